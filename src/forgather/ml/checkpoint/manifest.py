"""What a checkpoint says about itself: `checkpoint_manifest.json`."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from typing import Any

import xxhash

from forgather.ml.checkpoint.durable import replace_file
from forgather.ml.checkpoint.errors import CheckpointCorruptError, CheckpointVersionError
from forgather.ml.checkpoint.file_io import CHECKSUM_ALGORITHM

MANIFEST_NAME = "checkpoint_manifest.json"
FORMAT_VERSION = 1

EXACTNESS_CONTRACT = {
    "same_topology": "bit-identical continuation",
    "other_topology": "same global sample order, same weights and moments, random numbers re-derived",
}


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint, as it was written."""

    path: str
    size: int
    checksum: str
    writer_rank: int
    component: str
    tensors: dict[str, str] = field(default_factory=dict)
    """Weight files only: the checksum of each tensor, so that a reader of some tensors can verify just those; "" in
    `.bin` files, which are read and verified whole."""
    owner: int | None = None
    """The rank, group or node whose state this is, for patterns that have several files; else None."""
    owner_ranks: list[int] = field(default_factory=list)
    """The ranks that share this file's state; empty means all."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "FileRecord":
        try:
            check_relative_path(data["path"])
        except ValueError as error:
            raise CheckpointCorruptError(f"{MANIFEST_NAME} is damaged: it lists a file whose path {error}") from error
        return cls(**_known(cls, data))


def check_relative_path(path: Any) -> None:
    """Raise `ValueError` for a path that could lead out of the directory it is relative to, or has two spellings."""
    if not isinstance(path, str):
        raise ValueError(f"is not text: {path!r}")
    if not path or os.path.isabs(path) or "\0" in path or os.pardir in path.split(os.sep):
        raise ValueError(f"leads out of the directory: {path!r}")
    if os.path.normpath(path) != path or path == os.curdir:
        raise ValueError(f"is not in its plain form: {path!r}")


@dataclass
class ComponentManifest:
    """One component of a checkpoint: how it was shared, and by whom it was written."""

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
        # The enumeration and its value are the same word here: JSON knows only the latter.
        self.sharing_pattern = getattr(self.sharing_pattern, "value", self.sharing_pattern)


@dataclass
class CheckpointManifest:
    """The whole checkpoint: which files it is made of, which job wrote them, and what they must hash to."""

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
    """`{"shape": [...], "axis_names": [...]}` of the device mesh, None without one."""
    num_nodes: int = 1
    checksum_algorithm: str = CHECKSUM_ALGORITHM
    attempt: str | None = None
    """Names the save that wrote this checkpoint; the same in every node's copy of it."""
    weights: str = "included"
    """"external" when the model's weights are kept elsewhere, "none" when there is no model."""
    exactness: dict[str, str] = field(default_factory=lambda: dict(EXACTNESS_CONTRACT))
    files: list[FileRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        if isinstance(self.timestamp, datetime):
            self.timestamp = self.timestamp.isoformat()

    def to_dict(self) -> dict[str, Any]:
        data = asdict(self)
        for record in data["files"]:
            for optional in ("tensors", "owner", "owner_ranks"):
                if record[optional] in ({}, None, []):
                    del record[optional]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "CheckpointManifest":
        """Unknown keys are ignored; a newer format version is refused."""
        _refuse_newer(data)
        known = _known(cls, data)
        known["components"] = {key: ComponentManifest.from_dict(value) for key, value in data["components"].items()}
        known["files"] = [FileRecord.from_dict(record) for record in data.get("files", [])]
        return cls(**known)

    def save(self, path: str) -> None:
        replace_file(path, self.to_bytes())

    def to_bytes(self) -> bytes:
        """JSON text that carries a checksum of its own content."""
        data = self.to_dict()
        data["manifest_checksum"] = {"covers": sorted(data), "value": _content_checksum(data, sorted(data))}
        return (json.dumps(data, indent=2) + "\n").encode()

    @classmethod
    def load(cls, path: str, sealed: bool = False) -> "CheckpointManifest":
        """Read from a file, verified by the checksum it carries; with `sealed`, it must carry one."""
        with open(path, "rb") as file:
            text = file.read()
        try:
            data = json.loads(text)
            if not isinstance(data, dict):
                raise ValueError(f"expected an object, found {type(data).__name__}")
        except ValueError as error:
            raise CheckpointCorruptError(f"{path} is damaged: it is not readable as JSON ({error})") from error
        _refuse_newer(data)
        if sealed or "manifest_checksum" in data:
            _verify_content(data, path)
        try:
            return cls.from_dict(data)
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointCorruptError(
                f"{path} is damaged: a field is missing or malformed ({type(error).__name__}: {error})"
            ) from error

    def component_files(self, key: str) -> list[FileRecord]:
        return [record for record in self.files if record.component == key]

    @property
    def written_at(self) -> datetime:
        time = datetime.fromisoformat(self.timestamp)
        return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def read_manifest(checkpoint_path: str) -> CheckpointManifest:
    """The manifest of a checkpoint directory."""
    return CheckpointManifest.load(os.path.join(checkpoint_path, MANIFEST_NAME), sealed=True)


def utc_now() -> str:
    """ISO time with its UTC offset."""
    return datetime.now(UTC).isoformat()


def _known(cls: type, data: Mapping[str, Any]) -> dict[str, Any]:
    names = {entry.name for entry in fields(cls)}
    return {name: value for name, value in data.items() if name in names}


def _refuse_newer(data: Mapping[str, Any]) -> None:
    version = data.get("format_version", FORMAT_VERSION)
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise CheckpointVersionError(
            f"The checkpoint {data.get('checkpoint_path', '')!r} has format version {version}, written by forgather "
            f"{data.get('forgather_version', 'of unknown version')}; this installation reads versions up to "
            f"{FORMAT_VERSION}. Update forgather to load it."
        )


def _content_checksum(data: Mapping[str, Any], covers: list[str]) -> str:
    content = json.dumps({key: data[key] for key in covers if key in data}, sort_keys=True, separators=(",", ":"))
    return str(xxhash.xxh3_128_hexdigest(content.encode()))


def _verify_content(data: Mapping[str, Any], path: str) -> None:
    """Only the keys that were there at the time of writing count: ones that were added later are not damage."""
    seal = data.get("manifest_checksum")
    if not isinstance(seal, dict) or not isinstance(seal.get("covers"), list):
        raise CheckpointCorruptError(f"{path} is damaged: it carries no checksum of itself")
    found = _content_checksum(data, seal["covers"])
    if found != seal.get("value"):
        raise CheckpointCorruptError(f"{path} is damaged: its checksum is {found}, expected {seal.get('value')}")
