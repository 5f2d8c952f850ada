"""The transaction that makes files a checkpoint, and the rules by which one is found again.

A checkpoint comes into being by one rename of a directory that is already complete and on disk, and ends by one
rename to a name that nobody takes for a checkpoint. Names with a dot in front belong to this file:

    .tmp-<name>-<attempt>     files of a save in progress; after an exchange, the checkpoint it replaced
    .old-<name>-<attempt>     a checkpoint that is being replaced, where the system cannot exchange two names
    .trash-<name>-<attempt>   a checkpoint that is being deleted
"""

import contextlib
import errno
import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from forgather.ml.checkpoint import durable
from forgather.ml.checkpoint.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError
from forgather.ml.checkpoint.file_io import HashingWriter, new_hasher
from forgather.ml.checkpoint.manifest import MANIFEST_NAME, CheckpointManifest, FileRecord, read_manifest
from forgather.ml.checkpoint.state_files import verify_file

logger = logging.getLogger(__name__)

CHECKPOINTS_FOLDER = "checkpoints"
_OURS = re.compile(r"\.(?P<kind>tmp|old|trash)-(?P<name>.+)-(?P<attempt>[0-9a-f]{12})$")
_STEP = re.compile(r"checkpoint-(\d+)$")
# Room for directory entries, headers and the manifest, which are not counted tensor by tensor.
_SPACE_MARGIN = 2**20


def checkpoint_path(output_dir: str, checkpoint_id: str | int) -> str:
    """Where the checkpoint of a step (or of another name) lies."""
    name = str(checkpoint_id)
    if not name or os.sep in name or name != os.path.basename(name) or name.startswith(".") or "\0" in name:
        raise ValueError(
            f"checkpoint_id={checkpoint_id!r} cannot be used: it becomes the directory name checkpoint-<id>, so it must "
            "be a step number or a plain name without slashes or a leading dot. To save somewhere else, pass "
            "checkpoint_path."
        )
    return os.path.join(output_dir, CHECKPOINTS_FOLDER, f"checkpoint-{name}")


def step_of(path: str) -> int | None:
    """The step in a checkpoint's name, None for other names."""
    match = _STEP.search(os.path.basename(os.path.normpath(path)))
    return int(match.group(1)) if match else None


def new_attempt() -> str:
    """A name for one attempt to save, unique among all jobs."""
    return uuid.uuid4().hex[:12]


@dataclass(frozen=True)
class Transaction:
    """One attempt to write a checkpoint; every rank holds an equal one, one rank per directory begins and commits it."""

    final_path: str
    attempt: str

    @property
    def temporary_path(self) -> str:
        return _sibling(self.final_path, "tmp", self.attempt)

    def begin(self, needed_bytes: int) -> None:
        """Make the temporary directory, after a look at the space; ranks on other machines may do the same."""
        if os.path.lexists(self.final_path) and not os.path.isdir(self.final_path):
            raise NotADirectoryError(
                f"{self.final_path} exists and is not a directory; a checkpoint is a directory. Remove the file or "
                "choose another path."
            )
        parent = os.path.dirname(self.final_path)
        durable.make_directories(parent)
        if needed_bytes + _SPACE_MARGIN > shutil.disk_usage(parent).free:
            raise OSError(
                errno.ENOSPC, "Not enough space: free some, lower save_total_limit, or choose another output_dir"
            )
        durable.make_directories(self.temporary_path)

    @contextlib.contextmanager
    def accounting_for(self, needed_bytes: int) -> Iterator[None]:
        """Tell of the space with every error of the file system, since that is what it mostly is about."""
        try:
            yield
        except OSError as error:
            if error.errno is None:
                # Not of the file system but of ours, and explained already.
                raise
            parent = os.path.dirname(self.final_path)
            free = f"{shutil.disk_usage(parent).free:,}" if os.path.isdir(parent) else "an unknown number"
            what = error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
            told = f"{what} (the checkpoint needs {needed_bytes:,} bytes, {free} are available in {parent})"
            raise OSError(error.errno, told) from error

    def path_of(self, name: str) -> str:
        return os.path.join(self.temporary_path, name)

    def commit(self, manifest: CheckpointManifest) -> None:
        """Make the files a checkpoint, on disk when this returns. One rank per directory does it."""
        self._check_visible(manifest.files)
        manifest = replace(manifest, timestamp=self._later_than_all(manifest.timestamp))
        with HashingWriter(self.path_of(MANIFEST_NAME)) as writer:
            writer.write(manifest.to_bytes())
        durable.fsync_tree(self.temporary_path)
        parent = os.path.dirname(self.final_path)
        if not os.path.isdir(self.final_path):
            os.rename(self.temporary_path, self.final_path)
            durable.fsync_directory(parent)
        elif durable.exchange(self.temporary_path, self.final_path):
            durable.fsync_directory(parent)
            durable.remove_or_warn(self.temporary_path)
        else:
            self._replace_in_two_steps(parent)

    def roll_back(self) -> None:
        """Remove what this attempt wrote. Any rank may, once all have stopped writing."""
        if os.path.isdir(self.temporary_path):
            durable.remove_tree(self.temporary_path)

    def _replace_in_two_steps(self, parent: str) -> None:
        """Between the renames the new checkpoint is complete under a name that `recover` knows."""
        old = _sibling(self.final_path, "old", self.attempt)
        os.rename(self.final_path, old)
        os.rename(self.temporary_path, self.final_path)
        durable.fsync_directory(parent)
        durable.remove_or_warn(old)

    def _check_visible(self, records: Iterable[FileRecord]) -> None:
        for record in records:
            path = self.path_of(record.path)
            size = os.path.getsize(path) if os.path.exists(path) else None
            if size != record.size:
                raise OSError(
                    f"{record.path} was written by rank {record.writer_rank} ({record.size} bytes) but the committing rank "
                    f"finds {'nothing' if size is None else f'{size} bytes'} at {path}. The output directory is not "
                    "the same storage for all ranks: use a shared file system, or set save_on_each_node=True."
                )

    def _later_than_all(self, timestamp: str) -> str:
        """A clock that was set back must not make the newest checkpoint look old."""
        latest = datetime.fromisoformat(timestamp)
        for path in _candidates(os.path.dirname(self.final_path)):
            with contextlib.suppress(CheckpointError, ValueError, OSError):
                latest = max(latest, read_manifest(path).written_at + timedelta(microseconds=1))
        return latest.isoformat()


def _sibling(path: str, kind: str, attempt: str) -> str:
    parent, name = os.path.split(os.path.abspath(path))
    return os.path.join(parent, f".{kind}-{name}-{attempt}")


@dataclass(frozen=True)
class FoundCheckpoint:
    """A complete checkpoint on disk."""

    path: str
    manifest: CheckpointManifest
    missing_optional: list[str] = field(default_factory=list)
    """Files of optional components that the user removed to start those parts fresh."""


def open_checkpoint(path: str) -> FoundCheckpoint:
    """The complete checkpoint at `path`; `CheckpointCorruptError` (or another `CheckpointError`) says why there is none."""
    if not os.path.isdir(path):
        kind = "a file, not a checkpoint directory" if os.path.exists(path) else "no such directory"
        raise CheckpointNotFoundError(f"There is no checkpoint at {path}: {kind}.")
    if not os.path.exists(os.path.join(path, MANIFEST_NAME)):
        raise CheckpointCorruptError(
            f"{path} is not a complete checkpoint: {MANIFEST_NAME} is missing (a save that was interrupted, or a "
            "directory of another kind)."
        )
    manifest = read_manifest(path)
    missing = []
    for record in manifest.files:
        file_path = os.path.join(path, record.path)
        component = manifest.components.get(record.component)
        # Metadata files belong to no component: a checkpoint without its metrics still resumes.
        optional = component is None or not component.required
        if optional and not os.path.exists(file_path):
            missing.append(record.path)
            continue
        size = os.path.getsize(file_path) if os.path.exists(file_path) else None
        if size != record.size:
            raise CheckpointCorruptError(
                f"{path} is not complete: {record.path} (component {record.component!r}) should have {record.size} bytes, "
                f"but {'is missing' if size is None else f'has {size}'}."
            )
    return FoundCheckpoint(path, manifest, missing)


def is_complete(path: str) -> bool:
    """Whether a directory holds a complete checkpoint."""
    try:
        open_checkpoint(path)
    except CheckpointError:
        return False
    return True


def find_checkpoints(root: str) -> list[FoundCheckpoint]:
    """The complete checkpoints in a directory, oldest first by the time they were committed."""
    found = []
    for path in _candidates(root):
        try:
            found.append(open_checkpoint(path))
        except CheckpointCorruptError as error:
            logger.warning("Passing over %s: %s", path, error)
        except (CheckpointNotFoundError, FileNotFoundError):
            # Another job's rotation removed it since it was listed.
            continue
    return sorted(found, key=lambda checkpoint: (checkpoint.manifest.written_at, checkpoint.manifest.step or 0))


def _candidates(root: str) -> list[str]:
    """What has a manifest, or at least the name of a checkpoint: one that lost its manifest is worth a warning."""
    names = sorted(os.listdir(root)) if os.path.isdir(root) else []
    paths = [os.path.join(root, name) for name in names if not name.startswith(".")]
    return [
        path
        for path in paths
        if os.path.exists(os.path.join(path, MANIFEST_NAME)) or (step_of(path) is not None and os.path.isdir(path))
    ]


def verify_checkpoint(path: str) -> list[str]:
    """Read every file of a checkpoint against its checksum; returns what is wrong, one line for each."""
    try:
        found = open_checkpoint(path)
        records = [record for record in found.manifest.files if record.path not in found.missing_optional]
    except CheckpointCorruptError as error:
        try:
            records = read_manifest(path).files
        except (CheckpointError, OSError):
            return [str(error)]
    except (CheckpointError, OSError) as error:
        return [str(error)]
    problems = []
    for record in records:
        try:
            verify_file(path, record)
        except (CheckpointCorruptError, OSError) as error:
            problems.append(str(error))
    return problems


def delete_checkpoint(path: str) -> None:
    """Delete a checkpoint so that no instant shows half of it."""
    trash = _sibling(path, "trash", new_attempt())
    os.rename(path, trash)
    durable.fsync_directory(os.path.dirname(trash))
    durable.remove_tree(trash)


def recover(root: str) -> list[str]:
    """Finish or undo what a job that died left behind; the caller must be the only one at work here.

    Returns a line for each thing done.
    """
    done = []
    for entry in sorted(os.listdir(root)) if os.path.isdir(root) else []:
        match = _OURS.match(entry)
        if match is None or not os.path.exists(os.path.join(root, entry)):
            continue
        path, final = os.path.join(root, entry), os.path.join(root, match["name"])
        if match["kind"] == "old" and not os.path.exists(final):
            # The job died between the two renames of a replacement, when the new checkpoint was already complete.
            successor = _sibling(final, "tmp", match["attempt"])
            # Complete, unless a surviving rank had begun to remove it.
            os.rename(successor if is_complete(successor) else path, final)
            durable.fsync_directory(root)
            done.append(f"completed {final}, whose replacement was interrupted")
        if os.path.isdir(path) and durable.remove_or_warn(path):
            done.append(f"removed {path}, left by an interrupted save or deletion")
    for checkpoint in _candidates(root):
        for path in durable.remove_unfinished_replacements(checkpoint):
            done.append(f"removed {path}, left by an interrupted change of a file")
    return done


def amend_file(path: str, record: FileRecord, data: bytes) -> FileRecord:
    """Replace a small file of a committed checkpoint so that it verifies at every instant.

    The manifest first forgets the file, then the file changes, then the manifest knows the new content.
    """
    hasher = new_hasher()
    hasher.update(memoryview(data))
    amended = replace(record, size=len(data), checksum=hasher.hexdigest())
    manifest_path = os.path.join(path, MANIFEST_NAME)
    manifest = read_manifest(path)
    others = [entry for entry in manifest.files if entry.path != record.path]
    if len(others) != len(manifest.files):
        replace(manifest, files=others).save(manifest_path)
    durable.replace_file(os.path.join(path, record.path), data)
    replace(manifest, files=[*others, amended]).save(manifest_path)
    return amended
