"""Checkpoint manifest (`checkpoint_manifest.json`): files with sizes and checksums, components, and the job that saved.

The manifest carries a checksum of its content and is written last, so a directory with a valid manifest was written
completely. The coordinator builds it and the store writes it; readers call `read_manifest`.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from typing import Any

import xxhash

from forgather.ml.checkpoint.encoding import strict_json
from forgather.ml.checkpoint.errors import CheckpointCorruptError, CheckpointError, CheckpointVersionError
from forgather.ml.checkpoint.files.durable import replace_file
from forgather.ml.checkpoint.files.hashed_io import CHECKSUM_ALGORITHM
from forgather.ml.checkpoint.files.regular_files import read_small_file
from forgather.ml.checkpoint.state.state_schema import (
    Schema,
    Violation,
    anything,
    count,
    described,
    every,
    flag,
    list_of,
    mapping_of,
    optional,
    text,
    that,
)

MANIFEST_NAME = "checkpoint_manifest.json"
FORMAT_VERSION = 1
_LONGEST_PATH = 1024

EXACTNESS_CONTRACT = {
    "same_topology": "bit-identical continuation",
    "other_topology": "same global sample order, same weights and moments, random numbers re-derived",
}


@dataclass(frozen=True)
class FileRecord:
    """Record of one checkpoint file, as it was written."""

    path: str
    size: int
    checksum: str
    writer_rank: int
    component: str
    tensors: dict[str, str] = field(default_factory=dict)
    """Weight files only: checksum of each tensor, so that a reader can verify only the tensors it loads. The checksum
    is "" in `.bin` files, which are always read and verified in full."""
    owner: int | None = None
    """Number of the rank, group or node that has this state, for patterns with several files; otherwise None."""
    owner_ranks: list[int] = field(default_factory=list)
    """Ranks that share this file's state. Empty means all ranks."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "FileRecord":
        return cls(**_known(cls, data))


def check_relative_path(path: object) -> None:
    """Raise `ValueError` for a path that could leave its directory (path traversal) or is not normalised.

    A normalised path has one spelling, so that duplicates can be found by comparing text.
    """
    if not isinstance(path, str):
        raise ValueError(f"is not text: {path!r}")
    # JSON can contain lone surrogates, which UTF-8 cannot encode.
    if len(path) > _LONGEST_PATH or any("\ud800" <= sign <= "\udfff" for sign in path):
        raise ValueError(f"is not a file name: {path[:100]!r}")
    if not path or os.path.isabs(path) or "\0" in path or os.pardir in path.split(os.sep):
        raise ValueError(f"leads out of the directory: {path!r}")
    if os.path.normpath(path) != path or path == os.curdir:
        raise ValueError(f"is not normalised: {path!r}")


@dataclass
class ComponentManifest:
    """Entry for one component: its sharing pattern, the ranks that wrote it, and its size."""

    key: str
    sharing_pattern: str
    ranks: list[int]
    replicated_across: list[int] | None = None
    group_name: str | None = None
    size_bytes: int = 0
    checksum: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    required: bool = True

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "ComponentManifest":
        return cls(**_known(cls, data))

    def __post_init__(self) -> None:
        # Accept a `SharingPattern` member too. JSON stores its value.
        self.sharing_pattern = getattr(self.sharing_pattern, "value", self.sharing_pattern)


@dataclass
class CheckpointManifest:
    """Manifest of one checkpoint: its components, its files with their checksums, and the job that wrote them."""

    checkpoint_path: str
    world_size: int
    timestamp: str
    components: dict[str, ComponentManifest]
    training_args_hash: str | None = None
    forgather_version: str | None = None
    pytorch_version: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION
    step: int | None = None
    trainer_class: str | None = None
    mesh: dict[str, Any] | None = None
    """`{"shape": [...], "axis_names": [...]}` of the device mesh, or None."""
    num_nodes: int = 1
    checksum_algorithm: str = CHECKSUM_ALGORITHM
    attempt: str | None = None
    """Id of the save that wrote this checkpoint. Equal in the copies of all nodes."""
    weights: str = "included"
    """"external" if the model's weights are stored elsewhere, "none" if there is no model."""
    exactness: dict[str, str] = field(default_factory=lambda: dict(EXACTNESS_CONTRACT))
    files: list[FileRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        if isinstance(self.timestamp, datetime):
            self.timestamp = self.timestamp.isoformat()

    def to_dict(self) -> dict[str, Any]:
        # Files without `asdict`, which would copy each rank and tensor name of each file: slow with thousands of ranks.
        data = asdict(replace(self, files=[]))
        # The fields of most files are empty. `from_dict` restores these defaults.
        data["files"] = [
            {name: value for name, value in vars(record).items() if value not in ({}, None, [])}
            for record in self.files
        ]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "CheckpointManifest":
        """Return the manifest for parsed JSON; unknown keys are ignored.

        Raise `CheckpointVersionError` for a newer format, `CheckpointCorruptError` for content that no save writes.
        """
        # Before the schema: a newer format may violate it, and must not be reported as damage.
        _refuse_newer(data)
        try:
            _MANIFEST(data)
            _refuse_duplicate_paths(data.get("files", []))
        except Violation as violation:
            raise CheckpointCorruptError(f"{MANIFEST_NAME} is damaged: {violation.message('manifest')}") from None
        known = _known(cls, data)
        known["components"] = {key: ComponentManifest.from_dict(value) for key, value in data["components"].items()}
        known["files"] = [FileRecord.from_dict(record) for record in data.get("files", [])]
        return cls(**known)

    def save(self, path: str) -> None:
        replace_file(path, self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return JSON text that contains a checksum of its content."""
        data = self.to_dict()
        # The covered keys are listed, so that another version can add keys without invalidating the checksum.
        data["manifest_checksum"] = {"covers": sorted(data), "value": _content_checksum(data, sorted(data))}
        return strict_json.dumps(data, MANIFEST_NAME)

    @classmethod
    def load(cls, path: str, sealed: bool = False) -> "CheckpointManifest":
        """Read a manifest and verify the checksum it contains. With `sealed`, raise if it contains none."""
        data = strict_json.loads(read_small_file(path), path)
        if type(data) is not dict:
            raise CheckpointCorruptError(f"{path} is damaged: it holds {described(data)} instead of a JSON object")
        _refuse_newer(data)
        if sealed or "manifest_checksum" in data:
            _verify_content(data, path)
        try:
            return cls.from_dict(data)
        except CheckpointCorruptError as error:
            raise CheckpointCorruptError(os.path.join(os.path.dirname(path), str(error))) from None

    def component_files(self, key: str) -> list[FileRecord]:
        return [record for record in self.files if record.component == key]

    @property
    def written_at(self) -> datetime:
        return _parse_time(self.timestamp)


def _parse_time(timestamp: str) -> datetime:
    # Python cannot compare naive and aware times, so a time without offset is taken as UTC.
    time = datetime.fromisoformat(timestamp)
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


# Cache of manifests and of read errors, by path and file identity: a start reads each manifest several times.
_Identity = tuple[int, int, int, int, int]
_read: dict[str, tuple[_Identity, CheckpointManifest | CheckpointError]] = {}
_MOST_KEPT = 4096
# Longer than one timer tick of the kernel, which is the resolution of file times.
_CLOCK_TICK_NS = 20_000_000


def read_manifest(checkpoint_path: str) -> CheckpointManifest:
    """Return the manifest of a checkpoint directory, from a cache while the file is unchanged. Do not modify it."""
    path = os.path.join(os.path.abspath(checkpoint_path), MANIFEST_NAME)
    try:
        # The ctime changes even if a program restores the mtime of a modified file.
        status = os.lstat(path)
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        known = _read.get(path)
        if known is None or known[0] != identity:
            known = (identity, _read_sealed(path))
            if time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > _CLOCK_TICK_NS:
                # A file written just now could be rewritten in the same tick and keep its mtime, so do not cache it.
                _keep(path, known)
    except FileNotFoundError:
        # Not damage: rotation may have deleted the checkpoint since it was listed.
        raise
    except OSError as error:
        raise CheckpointCorruptError(f"{path} cannot be read: {error.strerror or error}") from error
    if isinstance(known[1], CheckpointError):
        raise known[1]
    return known[1]


def has_versioned_manifest(checkpoint_path: str) -> bool:
    """Return whether a directory has a manifest written by Forgather, intact or damaged.

    A manifest with neither format version nor checksum belongs to another program with the same file layout.
    """
    path = os.path.join(checkpoint_path, MANIFEST_NAME)
    if not os.path.lexists(path):
        return False
    try:
        # Intact manifests are usually cached. The handlers below are for damaged manifests and other programs.
        read_manifest(checkpoint_path)
        return True
    except FileNotFoundError:
        return False
    except CheckpointError:
        return not _is_unversioned(path)


def _is_unversioned(path: str) -> bool:
    try:
        data = strict_json.loads(read_small_file(path), path)
    except (CheckpointError, OSError):
        return False
    described_by_us = {"format_version", "manifest_checksum"}
    required = {"checkpoint_path", "world_size", "timestamp", "components"}
    return type(data) is dict and required <= set(data) and not described_by_us & set(data)


def _keep(path: str, known: tuple[_Identity, CheckpointManifest | CheckpointError]) -> None:
    # Dictionaries keep insertion order, so the first entry is the oldest.
    _read[path] = known
    while len(_read) > _MOST_KEPT:
        del _read[next(iter(_read))]


def _read_sealed(path: str) -> CheckpointManifest | CheckpointError:
    try:
        return CheckpointManifest.load(path, sealed=True)
    except CheckpointError as error:
        # The cache keeps this error. Its traceback would keep the text of the file in memory.
        return error.with_traceback(None)


def utc_now() -> str:
    """Return the current time in ISO format with its UTC offset."""
    return datetime.now(UTC).isoformat()


def _known(cls: type, data: Mapping[str, Any]) -> dict[str, Any]:
    names = {entry.name for entry in fields(cls)}
    return {name: value for name, value in data.items() if name in names}


def _check_time(value: object) -> None:
    try:
        is_time = type(value) is str and _FIRST_YEAR <= _parse_time(value).year < _LAST_YEAR
    except (ValueError, OverflowError):
        is_time = False
    if not is_time:
        raise Violation(f"an ISO time between the years {_FIRST_YEAR} and {_LAST_YEAR}", value)


def _check_path(value: object) -> None:
    try:
        check_relative_path(value)
    except ValueError as error:
        raise Violation(f"a relative path inside the checkpoint (it {error})", value) from None


def _refuse_duplicate_paths(files: Any) -> None:
    paths = [record["path"] for record in files]
    if len(set(paths)) < len(paths) or MANIFEST_NAME in paths:
        raise Violation("a list of files that each occur once", files).below("files")


# Clocks may be wrong, but every save needs a later time than the newest checkpoint, so the last years are not accepted.
_FIRST_YEAR, _LAST_YEAR = 1970, 9000
# A damaged world size must not make a reader build a range of billions of ranks.
_MOST_RANKS = 2**20

_ranks = list_of(count)
_FILE = Schema(
    {
        "path": _check_path,
        "size": count,
        "checksum": text,
        "writer_rank": count,
        "component": text,
        "tensors": mapping_of(text, text),
        "owner": optional(count),
        "owner_ranks": _ranks,
    },
    may_lack=("tensors", "owner", "owner_ranks"),
)
_COMPONENT = Schema(
    {
        "key": text,
        "sharing_pattern": that("text", lambda value: isinstance(getattr(value, "value", value), str)),
        "ranks": _ranks,
        "replicated_across": optional(_ranks),
        "group_name": optional(text),
        "size_bytes": count,
        "checksum": optional(text),
        "metadata": every(
            mapping_of(text, anything), Schema({"param_sharing": list_of(list_of(text))}, may_lack=("param_sharing",))
        ),
        "required": flag,
    },
    may_lack=("replicated_across", "group_name", "size_bytes", "checksum", "metadata", "required"),
)
_MANIFEST = Schema(
    {
        "checkpoint_path": text,
        "world_size": that(
            f"an integer from 1 to {_MOST_RANKS}", lambda value: type(value) is int and 1 <= value <= _MOST_RANKS
        ),
        "timestamp": _check_time,
        "components": mapping_of(text, _COMPONENT),
        "training_args_hash": optional(text),
        "forgather_version": optional(text),
        "pytorch_version": optional(text),
        "metadata": mapping_of(text, anything),
        "format_version": that("1", lambda value: type(value) is int and value == FORMAT_VERSION),
        "step": optional(count),
        "trainer_class": optional(text),
        "mesh": optional(mapping_of(text, anything)),
        "num_nodes": count,
        "checksum_algorithm": that(repr(CHECKSUM_ALGORITHM), lambda value: value == CHECKSUM_ALGORITHM),
        "attempt": optional(text),
        "weights": text,
        "exactness": mapping_of(text, text),
        "files": list_of(_FILE),
    },
    may_lack=(
        *("training_args_hash", "forgather_version", "pytorch_version", "metadata", "format_version", "step", "mesh"),
        *("trainer_class", "num_nodes", "checksum_algorithm", "attempt", "weights", "exactness", "files"),
    ),
)


def _refuse_newer(data: Mapping[str, Any]) -> None:
    # `type(...) is int`, because JSON `true` is an `int` for isinstance.
    version = data.get("format_version", FORMAT_VERSION)
    if type(version) is int and version > FORMAT_VERSION:
        raise CheckpointVersionError(
            f"The checkpoint {data.get('checkpoint_path', '')!r} has format version {version}, written by forgather "
            f"{data.get('forgather_version', 'of unknown version')}; this installation reads versions up to "
            f"{FORMAT_VERSION}. Update forgather to load it."
        )


def _content_checksum(data: Mapping[str, Any], covers: list[str]) -> str:
    # Canonical form: the checksum must not depend on key order or white space in the file.
    content = json.dumps({key: data[key] for key in covers if key in data}, sort_keys=True, separators=(",", ":"))
    return str(xxhash.xxh3_128_hexdigest(content.encode()))


def _verify_content(data: Mapping[str, Any], path: str) -> None:
    """Raise `CheckpointCorruptError` unless the manifest's checksum matches.

    The checksum covers the keys that existed at the time of writing. Keys added later are not damage.
    """
    seal = data.get("manifest_checksum")
    if (
        type(seal) is not dict
        or type(seal.get("covers")) is not list
        or not all(type(k) is str for k in seal["covers"])
    ):
        raise CheckpointCorruptError(f"{path} is damaged: it contains no valid manifest_checksum")
    found = _content_checksum(data, seal["covers"])
    if found != seal.get("value"):
        raise CheckpointCorruptError(f"{path} is damaged: its checksum is {found}, expected {seal.get('value')}")
