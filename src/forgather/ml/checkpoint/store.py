"""Checkpoint store: the commit by atomic rename, discovery of complete checkpoints, deletion, and crash recovery.

One rename of a directory that is already complete and fsynced creates a checkpoint. One rename to a dot name deletes
it. So a kill or a power failure never leaves half a checkpoint under a checkpoint's name. The coordinator commits
through `Transaction`; the manager and rotation find, recover and delete checkpoints.
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
from collections.abc import Callable, Collection, Iterable, Iterator
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
from forgather.ml.checkpoint.files.layout import CHECKPOINT_PREFIX, IN_FOLDER, TRAINER_STATE_NAME, checkpoints_root
from forgather.ml.checkpoint.files.layout import CHECKPOINTS_FOLDER as CHECKPOINTS_FOLDER
from forgather.ml.checkpoint.files.regular_files import is_real_directory, path_inside
from forgather.ml.checkpoint.foreign.ownership import SET_ASIDE, Owner, has_own_files, is_ours, owner_of, recognise
from forgather.ml.checkpoint.manifest import MANIFEST_NAME, CheckpointManifest, FileRecord, read_manifest

logger = logging.getLogger(__name__)

# Names next to the checkpoints that are reserved for this module. Discovery ignores them; `recover` cleans them up.
#
#     .tmp-<name>-<attempt>     Files of a save in progress. After an exchange, the replaced checkpoint.
#     .old-<name>-<attempt>     A checkpoint being replaced, if the file system cannot exchange two names.
#     .trash-<name>-<attempt>   A checkpoint being deleted.
#
# `<name>.set-aside-<attempt>` is a damaged or unknown directory that a save found under the name it needed. It is never
# resumed, counted or deleted.
LEFTOVER = re.compile(r"\.(?P<kind>tmp|old|trash)-(?P<name>.+)-(?P<attempt>[0-9a-f]{12})$")
# Files that no load reads and users may edit: a changed one does not make a checkpoint incomplete.
EDITABLE_FILES = (EVAL_METRICS_NAME, TRAINER_STATE_NAME)
# 18 digits always fit into a signed 64-bit integer.
_STEP = re.compile(r"checkpoint-([0-9]{1,18})")
# Readers hold no lock. Each repetition needs another save in between, so this number is never reached in practice.
_MOST_READS = 10
# Room for directory entries, file headers and the manifest: `needed_bytes` counts only the contents of files.
_SPACE_MARGIN = 2**20


def checkpoint_path(output_dir: str, checkpoint_id: str | int, layout: str = IN_FOLDER) -> str:
    """Return the path of the checkpoint for a step (or another name) in a layout of the output directory."""
    name = str(checkpoint_id)
    if not name or os.sep in name or name != os.path.basename(name) or name.startswith(".") or "\0" in name:
        raise ValueError(
            f"checkpoint_id={checkpoint_id!r} cannot be used: it becomes the directory name checkpoint-<id>, so it must "
            "be a step number or a plain name without slashes or a leading dot. To save somewhere else, pass "
            "checkpoint_path."
        )
    return os.path.join(checkpoints_root(output_dir, layout), f"{CHECKPOINT_PREFIX}{name}")


def step_of(path: str) -> int | None:
    """Return the step in a checkpoint's directory name, or None for other names."""
    match = _STEP.fullmatch(os.path.basename(os.path.normpath(path)))
    return int(match.group(1)) if match else None


def new_attempt() -> str:
    """Return a unique id for one attempt to save."""
    return uuid.uuid4().hex[:12]


@dataclass(frozen=True)
class Transaction:
    """One attempt to write a checkpoint. All ranks hold equal transactions; one rank per directory commits."""

    final_path: str
    attempt: str

    @property
    def temporary_path(self) -> str:
        return _sibling(self.final_path, "tmp", self.attempt)

    def begin(self, needed_bytes: int) -> None:
        """Check the free space and create the temporary directory. Every rank may call this for the same directory."""
        # Fail before gigabytes are written. `commit` checks again.
        refuse_occupied(self.final_path)
        parent = os.path.dirname(self.final_path)
        durable.make_directories(parent)
        # An early check saves a long write that cannot succeed. Other jobs may still fill the disk meanwhile.
        if needed_bytes + _SPACE_MARGIN > shutil.disk_usage(parent).free:
            raise OSError(
                errno.ENOSPC, "Not enough space: free some, lower save_total_limit, or choose another output_dir"
            )
        durable.make_directories(self.temporary_path)

    @contextlib.contextmanager
    def accounting_for(self, needed_bytes: int) -> Iterator[None]:
        """Add the required and the available space to errors of the file system: a full disk is the usual cause."""
        try:
            yield
        except OSError as error:
            if error.errno is None:
                # Raised by Forgather, not by the system: the message already explains the cause.
                raise
            parent = os.path.dirname(self.final_path)
            free = f"{shutil.disk_usage(parent).free:,}" if os.path.isdir(parent) else "an unknown number"
            what = error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
            told = f"{what} (the checkpoint needs {needed_bytes:,} bytes, {free} are available in {parent})"
            raise OSError(error.errno, told) from error

    def path_of(self, name: str) -> str:
        return os.path.join(self.temporary_path, name)

    def commit(self, manifest: CheckpointManifest) -> None:
        """Write the manifest and rename the directory to its final name. On disk when this returns.

        Called by one rank per directory, after all ranks have written their files.
        """
        self._check_visible(manifest.files)
        manifest = replace(manifest, timestamp=self._later_than_all(manifest.timestamp))
        with HashingWriter(self.path_of(MANIFEST_NAME)) as writer:
            writer.write(manifest.to_bytes())
        # The entries must be on disk before the rename. Otherwise a power failure could keep the rename and lose files.
        durable.fsync_tree(self.temporary_path)
        parent = os.path.dirname(self.final_path)
        # Another program may have created something here since `begin`.
        refuse_occupied(self.final_path)
        if os.path.lexists(self.final_path) and not is_complete(self.final_path):
            set_aside(self.final_path, self.attempt)
        if not os.path.lexists(self.final_path):
            # A kill before the rename leaves a `.tmp-` directory, which `recover` deletes.
            os.rename(self.temporary_path, self.final_path)
            durable.fsync_directory(parent)
        elif durable.exchange(self.temporary_path, self.final_path):
            # The final name always held a complete checkpoint: first the old one, now the new one. The old one is now
            # called `.tmp-`. The fsync must come before its removal: a power failure that undoes the exchange after
            # the removal would lose both.
            durable.fsync_directory(parent)
            durable.remove_or_warn(self.temporary_path)
        else:
            self._replace_in_two_steps(parent)

    def roll_back(self) -> None:
        """Remove the files of this attempt. Any rank may call this once all ranks have stopped writing."""
        # Several ranks may do this at the same time; `remove_tree` ignores entries that are already gone.
        if os.path.isdir(self.temporary_path):
            durable.remove_tree(self.temporary_path)

    def _replace_in_two_steps(self, parent: str) -> None:
        """Replace a checkpoint by two renames, where the file system has no atomic exchange."""
        old = _sibling(self.final_path, "old", self.attempt)
        os.rename(self.final_path, old)
        # Crash window: the final name does not exist. The old checkpoint is complete as `.old-`, the new one as `.tmp-`
        # with the same attempt, so that `recover` can pair them and finish the second rename.
        os.rename(self.temporary_path, self.final_path)
        # Both renames must be on disk before the old checkpoint is deleted.
        durable.fsync_directory(parent)
        durable.remove_or_warn(old)

    def _check_visible(self, records: Iterable[FileRecord]) -> None:
        """Raise `OSError` unless the committing rank sees the files of all ranks with their sizes."""
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
        """Return `timestamp`, or a time just after the newest checkpoint if the clock was set back.

        Resume and retention order checkpoints by this time, so the new checkpoint must be the latest.
        """
        latest = datetime.fromisoformat(timestamp)
        for path in _candidates(os.path.dirname(self.final_path)):
            with contextlib.suppress(CheckpointError, OSError):
                latest = max(latest, read_manifest(path).written_at + timedelta(microseconds=1))
        return latest.isoformat()


def _sibling(path: str, kind: str, attempt: str) -> str:
    # In the same directory, because a rename is atomic only within one file system.
    parent, name = os.path.split(os.path.abspath(path))
    return os.path.join(parent, f".{kind}-{name}-{attempt}")


@dataclass(frozen=True)
class FoundCheckpoint:
    """Complete checkpoint on disk."""

    path: str
    manifest: CheckpointManifest
    missing_optional: list[str] = field(default_factory=list)
    """Missing files of optional components, which start fresh, and missing metadata files."""


def open_checkpoint(path: str) -> FoundCheckpoint:
    """Return the complete checkpoint at `path`. Raise `CheckpointCorruptError` or another `CheckpointError` if not.

    Only names and sizes of files are checked here; readers verify checksums. A checkpoint that a job deletes meanwhile
    raises `CheckpointNotFoundError`, and one that it replaces is read again.
    """
    for _ in range(_MOST_READS):
        before = _fingerprint(path)
        try:
            return _open_now(path)
        except (CheckpointError, OSError):
            if _fingerprint(path) == before:
                raise
    return _open_now(path)


def _fingerprint(path: str) -> tuple[object, ...] | None:
    """Return a value that changes when a checkpoint is replaced or amended; None if there is no directory."""
    try:
        directory = os.stat(path)
    except OSError:
        return None
    try:
        manifest = os.lstat(os.path.join(path, MANIFEST_NAME))
    except OSError:
        return directory.st_dev, directory.st_ino
    # A new file may get the inode number of a deleted one, but never an earlier time of change.
    return directory.st_dev, directory.st_ino, manifest.st_ino, manifest.st_ctime_ns


def _open_now(path: str) -> FoundCheckpoint:
    if not os.path.isdir(path):
        kind = "a file, not a checkpoint directory" if os.path.lexists(path) else "no such directory"
        raise CheckpointNotFoundError(f"There is no checkpoint at {path}: {kind}.")
    if not os.path.lexists(os.path.join(path, MANIFEST_NAME)):
        raise CheckpointCorruptError(
            f"{path} is not a complete checkpoint: {MANIFEST_NAME} is missing (an interrupted save, or a directory of "
            "another kind)."
        )
    manifest = read_manifest(path)
    missing = []
    for record in manifest.files:
        component = manifest.components.get(record.component)
        # Metadata files belong to no component. A checkpoint can be resumed without its metrics.
        optional = component is None or not component.required
        size = _size_of(path, record)
        if optional and size is None:
            missing.append(record.path)
        elif size != record.size and record.path not in EDITABLE_FILES:
            raise CheckpointCorruptError(
                f"{path} is not complete: {record.path} (component {record.component!r}) should have {record.size} bytes, "
                f"but {'is missing' if size is None else f'has {size}'}."
            )
    return FoundCheckpoint(path, manifest, missing)


def _size_of(path: str, record: FileRecord) -> int | None:
    """Return the size of a regular file, or None if it is missing. Raise `CheckpointCorruptError` for anything else."""
    file_path = path_inside(path, record.path)
    try:
        # `lstat`, because a symlink must not lead a reader out of the checkpoint.
        status = os.lstat(file_path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointCorruptError(f"{file_path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointCorruptError(f"{file_path} is damaged: it is not a regular file")
    return status.st_size


def set_aside(path: str, attempt: str) -> None:
    """Rename a damaged or unknown directory that occupies the name of a save. It is kept: a user may need its files."""
    if not os.path.lexists(path):
        return
    aside = f"{path}.set-aside-{attempt}"
    os.rename(path, aside)
    durable.fsync_directory(os.path.dirname(os.path.abspath(path)))
    logger.warning(
        "%s was damaged or not a Forgather checkpoint. It is kept as %s, which is never resumed, counted or deleted.",
        path,
        aside,
    )


def move_older_run(root: str, any_name: bool = True) -> str | None:
    """Move Forgather's checkpoints in `root` into a new folder `before-<UTC time>`. Return its path, or None."""
    older = [path for path in _candidates(root, any_name) if is_ours(path)]
    if not older:
        return None
    folder = _unused(os.path.join(root, f"before-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"))
    os.mkdir(folder)
    # Not atomic as a whole, but after a kill every checkpoint is complete in one of the two folders.
    for path in older:
        os.rename(path, os.path.join(folder, os.path.basename(path)))
    durable.fsync_directory(folder)
    durable.fsync_directory(root)
    return folder


def _unused(path: str) -> str:
    # Two moves may happen within the same second.
    names = (path if number == 1 else f"{path}-{number}" for number in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))


def refuse_occupied(path: str) -> None:
    """Raise if `path` is a symlink, a file or a checkpoint of another program: a save must not replace or rename it."""
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
    """Return the checkpoint names in `root` that belong to other programs. Raise if a checkpoint name is a symlink."""
    names = sorted(os.listdir(root)) if os.path.isdir(root) else []
    paths = [os.path.join(root, name) for name in names if step_of(os.path.join(root, name)) is not None]
    for path in paths:
        if os.path.islink(path):
            refuse_occupied(path)
    return frozenset(os.path.basename(path) for path in paths if os.path.isdir(path) and recognise(path) is not None)


def name_beside_others(checkpoint_id: str | int, taken: Collection[str]) -> str | int:
    """Return `checkpoint_id`, with a suffix if a checkpoint of another program has the name: it is never replaced."""
    return f"{checkpoint_id}-forgather" if f"{CHECKPOINT_PREFIX}{checkpoint_id}" in taken else checkpoint_id


def checkpoints_of_others(*folders: str) -> list[tuple[str, Owner]]:
    """Return directories with training state of other programs, with their owners. The latest step comes last."""
    existing = [folder for folder in dict.fromkeys(folders) if os.path.isdir(folder)]
    listed = [os.path.join(folder, name) for folder in existing for name in os.listdir(folder)]
    paths = [path for path in listed if os.path.isdir(path) and not os.path.basename(path).startswith(".")]
    owners = [(path, owner_of(path)) for path in sorted(paths, key=lambda path: (step_of(path) or -1, path))]
    return [(path, owner) for path, owner in owners if owner.has_training_state]


def is_complete(path: str) -> bool:
    """Return whether a directory holds a complete checkpoint."""
    try:
        open_checkpoint(path)
    except CheckpointError:
        return False
    return True


def find_checkpoints(root: str, any_name: bool = True) -> list[FoundCheckpoint]:
    """Return the complete checkpoints in a directory, oldest first by commit time.

    `any_name=False` counts only names `checkpoint-...`, for an output directory with other directories.
    """
    found = []
    for path in _candidates(root, any_name):
        try:
            found.append(open_checkpoint(path))
        except (CheckpointNotFoundError, FileNotFoundError):
            # Another job's rotation deleted it after `_candidates` listed it.
            continue
        except CheckpointVersionError:
            # Not damage. Falling back to an older checkpoint would lose the training of the newer version.
            raise
        except (CheckpointError, OSError) as error:
            # A checkpoint of another program is not damaged, so it gets no warning.
            if recognise(path) is None:
                logger.warning("Skipping %s: %s", path, error)
    return sorted(found, key=lambda checkpoint: (checkpoint.manifest.written_at, checkpoint.manifest.step or 0))


def _candidates(root: str, any_name: bool = True) -> list[str]:
    """Return directories (no symlinks) that have a manifest or a checkpoint's name.

    The name alone is enough, so that `find_checkpoints` warns about a checkpoint without its manifest.
    """
    names = sorted(os.listdir(root)) if os.path.isdir(root) else []
    names = [name for name in names if any_name or name.startswith(CHECKPOINT_PREFIX)]
    paths = [os.path.join(root, name) for name in names if not name.startswith(".") and not SET_ASIDE.match(name)]
    return [
        path
        for path in paths
        if is_real_directory(path) and (step_of(path) is not None or os.path.lexists(os.path.join(path, MANIFEST_NAME)))
    ]


def verify_checkpoint(path: str, note_bytes: Callable[[int], None] | None = None) -> list[str]:
    """Read every file and check its checksum and format. Return one line per problem. `note_bytes` gets bytes read."""
    problems = verify_unless_gone(path, note_bytes)
    return [f"There is no checkpoint at {path}."] if problems is None else problems


def verify_unless_gone(path: str, note_bytes: Callable[[int], None] | None = None) -> list[str] | None:
    """Return the problems of a checkpoint, as `verify_checkpoint`; None if there is none, or if a job has deleted it.

    A checkpoint that a job replaces meanwhile is read again.
    """
    problems: list[str] | None = None
    for _ in range(_MOST_READS):
        before = _fingerprint(path)
        problems = _problems_now(path, note_bytes)
        if not problems or _fingerprint(path) == before:
            return problems
    return problems


def _problems_now(path: str, note_bytes: Callable[[int], None] | None) -> list[str] | None:
    try:
        found = open_checkpoint(path)
        manifest, missing = found.manifest, found.missing_optional
    except CheckpointNotFoundError:
        return None
    except CheckpointCorruptError as error:
        try:
            # If a file is missing or has another size, check every file so that all problems are reported.
            manifest, missing = read_manifest(path), []
        except (CheckpointError, OSError):
            return [str(error)]
    except (CheckpointError, OSError) as error:
        return [str(error)]
    present = [record for record in manifest.files if record.path not in missing]
    from forgather.ml.checkpoint.files.verification import problems_by_file, problems_with_weights

    problems = [problem for found in problems_by_file(path, present, note_bytes).values() for problem in found]
    # The check across weight files makes sense only if each file is intact.
    return problems or problems_with_weights(path, manifest)


def delete_checkpoint(path: str) -> None:
    """Delete one of Forgather's checkpoints. An atomic rename comes first, so that no reader sees half of it."""
    if not is_ours(path):
        raise CheckpointError(f"{path} was not deleted: it is not a real directory with a Forgather manifest.")
    trash = _sibling(path, "trash", new_attempt())
    os.rename(path, trash)
    # Otherwise a power failure could undo the rename, and files would be missing under the checkpoint's name.
    durable.fsync_directory(os.path.dirname(trash))
    durable.remove_tree(trash)


def recover(root: str, any_name: bool = True) -> list[str]:
    """Finish or undo the saves and deletions of a killed job. Return one line per action.

    The caller must hold the lock of the output directory: a `.tmp-` of a running save would be deleted.
    `any_name=False`: other programs may use such names in `root` too, so only Forgather's directories are touched.
    """
    done = []
    # In sorted order `.old-` comes before `.tmp-`, so the successor below has not been deleted yet.
    for entry in sorted(os.listdir(root)) if os.path.isdir(root) else []:
        match = LEFTOVER.match(entry)
        if match is None or not is_real_directory(os.path.join(root, entry)):
            continue
        path, final = os.path.join(root, entry), os.path.join(root, match["name"])
        if not (any_name or match["name"].startswith(CHECKPOINT_PREFIX) or has_own_files(path)):
            continue
        if match["kind"] == "old" and not os.path.lexists(final):
            # The job was killed between the two renames of a replacement, when the new checkpoint was complete.
            successor = _sibling(final, "tmp", match["attempt"])
            # It may be gone or incomplete if a surviving rank rolled the save back. Then the old one is restored.
            os.rename(successor if is_complete(successor) else path, final)
            durable.fsync_directory(root)
            done.append(f"completed the interrupted replacement of {final}")
        # False if the old checkpoint has just been restored.
        if os.path.isdir(path) and durable.remove_or_warn(path):
            done.append(f"removed {path}, left by an interrupted save or deletion")
    # A kill during `amend_file` leaves a temporary file inside a committed checkpoint.
    for checkpoint in filter(is_ours, _candidates(root, any_name)):
        for path in durable.remove_unfinished_replacements(checkpoint):
            done.append(f"removed {path}, left by an interrupted change of a file")
    return done


def amend_file(path: str, record: FileRecord, data: bytes) -> FileRecord:
    """Replace a small file of a committed checkpoint so that the checkpoint verifies at every instant.

    Three atomic renames: a manifest without the file, the new file, a manifest with the new checksum. After a crash in
    between, the manifest does not list the file, so its content cannot contradict a checksum.
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
