"""The transaction that makes files a checkpoint, and the rules by which one is found again.

A checkpoint comes into being by one rename of a directory that is already complete and on disk, and ends by one
rename to a name that nobody takes for a checkpoint. Names with a dot in front belong to this file:

    .tmp-<name>-<attempt>     files of a save in progress; after an exchange, the checkpoint it replaced
    .old-<name>-<attempt>     a checkpoint that is being replaced, where the system cannot exchange two names
    .trash-<name>-<attempt>   a checkpoint that is being deleted

A directory that a save finds under its name, and that is damaged or not recognisably ours, is renamed to
`<name>.set-aside-<attempt>`; such names are never resumed, counted or deleted.
"""

import contextlib
import errno
import itertools
import logging
import os
import re
import shutil
import stat
import uuid
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from forgather.ml.checkpoint.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointVersionError,
)
from forgather.ml.checkpoint.files import durable
from forgather.ml.checkpoint.files.eval_metrics import EVAL_METRICS_NAME
from forgather.ml.checkpoint.files.hashed_io import HashingWriter, new_hasher
from forgather.ml.checkpoint.files.regular_files import is_real_directory, path_inside
from forgather.ml.checkpoint.files.verification import problems_with_file, problems_with_weights
from forgather.ml.checkpoint.foreign.ownership import SET_ASIDE, Owner, is_ours, owner_of, recognise
from forgather.ml.checkpoint.manifest import MANIFEST_NAME, CheckpointManifest, FileRecord, read_manifest

logger = logging.getLogger(__name__)

CHECKPOINTS_FOLDER = "checkpoints"
_OURS = re.compile(r"\.(?P<kind>tmp|old|trash)-(?P<name>.+)-(?P<attempt>[0-9a-f]{12})$")
_STEP = re.compile(r"checkpoint-([0-9]{1,18})")
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
    match = _STEP.fullmatch(os.path.basename(os.path.normpath(path)))
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
        refuse_occupied(self.final_path)
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
        refuse_occupied(self.final_path)
        if os.path.lexists(self.final_path) and not is_complete(self.final_path):
            set_aside(self.final_path, self.attempt)
        if not os.path.lexists(self.final_path):
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
            with contextlib.suppress(CheckpointError, OSError):
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
        kind = "a file, not a checkpoint directory" if os.path.lexists(path) else "no such directory"
        raise CheckpointNotFoundError(f"There is no checkpoint at {path}: {kind}.")
    if not os.path.lexists(os.path.join(path, MANIFEST_NAME)):
        raise CheckpointCorruptError(
            f"{path} is not a complete checkpoint: {MANIFEST_NAME} is missing (a save that was interrupted, or a "
            "directory of another kind)."
        )
    manifest = read_manifest(path)
    missing = []
    for record in manifest.files:
        component = manifest.components.get(record.component)
        # Metadata files belong to no component: a checkpoint without its metrics still resumes.
        optional = component is None or not component.required
        size = _size_of(path, record)
        if optional and size is None:
            missing.append(record.path)
        elif size != record.size and record.path != EVAL_METRICS_NAME:
            raise CheckpointCorruptError(
                f"{path} is not complete: {record.path} (component {record.component!r}) should have {record.size} bytes, "
                f"but {'is missing' if size is None else f'has {size}'}."
            )
    return FoundCheckpoint(path, manifest, missing)


def _size_of(path: str, record: FileRecord) -> int | None:
    """The size of a regular file, None where there is nothing; anything else is damage."""
    file_path = path_inside(path, record.path)
    try:
        status = os.lstat(file_path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointCorruptError(f"{file_path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointCorruptError(f"{file_path} is damaged: it is no regular file")
    return status.st_size


def set_aside(path: str, attempt: str) -> None:
    """Rename a directory that is damaged or not recognisably ours out of a save's way: somebody may still want it."""
    if not os.path.lexists(path):
        return
    aside = f"{path}.set-aside-{attempt}"
    os.rename(path, aside)
    durable.fsync_directory(os.path.dirname(os.path.abspath(path)))
    logger.warning(
        "%s was damaged or not a checkpoint of ours; it is kept as %s, which is never resumed, counted or deleted.",
        path,
        aside,
    )


def move_older_run(root: str) -> str | None:
    """Move the checkpoints of ours in a directory into a folder `before-<UTC time>` there, and return its path."""
    older = [path for path in _candidates(root) if is_ours(path)]
    if not older:
        return None
    folder = _unused(os.path.join(root, f"before-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"))
    os.mkdir(folder)
    for path in older:
        os.rename(path, os.path.join(folder, os.path.basename(path)))
    durable.fsync_directory(folder)
    durable.fsync_directory(root)
    return folder


def _unused(path: str) -> str:
    names = (path if number == 1 else f"{path}-{number}" for number in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))


def refuse_occupied(path: str) -> None:
    """Raise when something lies at a checkpoint's path that must neither be replaced nor renamed."""
    if not os.path.lexists(path):
        return
    remedy = "Move it elsewhere, or choose another output_dir or path."
    if os.path.islink(path):
        raise FileExistsError(f"{path} is a symbolic link, which a checkpoint never replaces. {remedy}")
    if not os.path.isdir(path):
        raise NotADirectoryError(f"{path} exists and is not a directory; a checkpoint is a directory. {remedy}")
    owner = owner_of(path)
    if owner.is_other_program:
        raise FileExistsError(f"{path} is {owner.value}, which is never replaced or deleted. {remedy}")


def names_taken_by_others(root: str) -> frozenset[str]:
    """Names that a save may need and that another program's checkpoint has; a symbolic link there is an error."""
    names = sorted(os.listdir(root)) if os.path.isdir(root) else []
    paths = [os.path.join(root, name) for name in names if step_of(os.path.join(root, name)) is not None]
    for path in paths:
        if os.path.islink(path):
            refuse_occupied(path)
    return frozenset(os.path.basename(path) for path in paths if os.path.isdir(path) and recognise(path) is not None)


def name_beside_others(checkpoint_id: str | int, taken: Collection[str]) -> str | int:
    """An id for a save whose name may be taken by another program's checkpoint, which is never replaced."""
    return f"{checkpoint_id}-forgather" if f"checkpoint-{checkpoint_id}" in taken else checkpoint_id


def checkpoints_of_others(*folders: str) -> list[tuple[str, Owner]]:
    """Directories in which another program keeps training state, with whose they are; the latest step comes last."""
    listed = [os.path.join(folder, name) for folder in folders if os.path.isdir(folder) for name in os.listdir(folder)]
    paths = [path for path in listed if os.path.isdir(path) and not os.path.basename(path).startswith(".")]
    owners = [(path, owner_of(path)) for path in sorted(paths, key=lambda path: (step_of(path) or -1, path))]
    return [(path, owner) for path, owner in owners if owner.has_training_state]


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
        except (CheckpointNotFoundError, FileNotFoundError):
            # Another job's rotation removed it since it was listed.
            continue
        except CheckpointVersionError:
            # Not damage: an older checkpoint in its place would lose what the newer forgather has trained.
            raise
        except (CheckpointError, OSError) as error:
            if recognise(path) is None:
                logger.warning("Passing over %s: %s", path, error)
    return sorted(found, key=lambda checkpoint: (checkpoint.manifest.written_at, checkpoint.manifest.step or 0))


def _candidates(root: str) -> list[str]:
    """Real directories with a manifest, or at least the name of a checkpoint: a lost manifest is worth a warning."""
    names = sorted(os.listdir(root)) if os.path.isdir(root) else []
    paths = [os.path.join(root, name) for name in names if not name.startswith(".") and not SET_ASIDE.match(name)]
    return [
        path
        for path in paths
        if is_real_directory(path) and (step_of(path) is not None or os.path.lexists(os.path.join(path, MANIFEST_NAME)))
    ]


def verify_checkpoint(path: str) -> list[str]:
    """Read every file of a checkpoint against its checksum and its format; returns what is wrong, one line for each."""
    try:
        found = open_checkpoint(path)
        manifest, missing = found.manifest, found.missing_optional
    except CheckpointCorruptError as error:
        try:
            # Of a checkpoint that lacks a file, each file is looked at all the same.
            manifest, missing = read_manifest(path), []
        except (CheckpointError, OSError):
            return [str(error)]
    except (CheckpointError, OSError) as error:
        return [str(error)]
    present = [record for record in manifest.files if record.path not in missing]
    problems = [problem for record in present for problem in problems_with_file(path, record)]
    return problems or problems_with_weights(path, manifest)


def delete_checkpoint(path: str) -> None:
    """Delete a checkpoint of ours so that no instant shows half of it."""
    if not is_ours(path):
        raise CheckpointError(f"{path} was not deleted: it is no real directory with a manifest of ours.")
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
        if match is None or not is_real_directory(os.path.join(root, entry)):
            continue
        path, final = os.path.join(root, entry), os.path.join(root, match["name"])
        if match["kind"] == "old" and not os.path.lexists(final):
            # The job died between the two renames of a replacement, when the new checkpoint was already complete.
            successor = _sibling(final, "tmp", match["attempt"])
            # Complete, unless a surviving rank had begun to remove it.
            os.rename(successor if is_complete(successor) else path, final)
            durable.fsync_directory(root)
            done.append(f"completed {final}, whose replacement was interrupted")
        if os.path.isdir(path) and durable.remove_or_warn(path):
            done.append(f"removed {path}, left by an interrupted save or deletion")
    for checkpoint in filter(is_ours, _candidates(root)):
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
