"""Durable file-system operations: fsync, atomic rename and exchange, safe removal.

A change is on disk when its function returns. `store`, `manifest` and `weights` use these functions instead of `os`.
"""

import contextlib
import ctypes
import errno
import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterator

logger = logging.getLogger(__name__)

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
# Names of the temporary files of `replace_file`, for the clean-up after a kill.
_UNFINISHED = re.compile(r"\.(checkpoint_manifest|checkpoint_metadata|eval_metrics)\.json-[0-9a-f]{8}$")
# Errors of renameat2 when the kernel or the file system does not support RENAME_EXCHANGE.
_EXCHANGE_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


def fsync_directory(path: str) -> None:
    """Fsync a directory, so that its entries (new files, renames) survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(path: str) -> None:
    """Fsync a directory and all directories below it."""
    # Bottom-up, so that a durable entry never points to a directory that is not.
    for directory, _, _ in os.walk(path, topdown=False):
        fsync_directory(directory)


def make_directories(path: str) -> None:
    """Create a directory and its missing parents like `os.makedirs(exist_ok=True)`, with fsync of each new entry."""
    missing = []
    current = os.path.abspath(path)
    while not os.path.isdir(current):
        missing.append(current)
        current = os.path.dirname(current)
    for directory in reversed(missing):
        _make_directory(directory)
        fsync_directory(os.path.dirname(directory))


def make_parents_below(root: str, relative_path: str) -> None:
    """Create the parent directories of a file inside `root`, but never `root` itself."""
    # Another rank may have rolled the save back and removed `root`. Creating it again would leave debris.
    current = root
    for name in os.path.dirname(relative_path).split(os.sep):
        if name:
            current = os.path.join(current, name)
            _make_directory(current)


def _make_directory(path: str) -> None:
    try:
        os.mkdir(path)
    except FileExistsError:
        # Other ranks create the same directories at the same time.
        if not os.path.isdir(path):
            raise


def exchange(first: str, second: str) -> bool:
    """Swap two directory entries atomically (RENAME_EXCHANGE); return False if the system does not support it."""
    # Python has no wrapper for renameat2, so call it through ctypes.
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    if libc.renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _EXCHANGE_UNSUPPORTED:
        return False
    # A call through ctypes only sets errno and raises nothing.
    raise OSError(code, os.strerror(code), second)


def remove_tree(path: str) -> None:
    """Delete a directory tree; ignore entries that another process deletes at the same time."""

    def ignore_missing(_function: object, _path: str, error_info: tuple[type, BaseException, object]) -> None:
        if not isinstance(error_info[1], FileNotFoundError):
            raise error_info[1]

    shutil.rmtree(path, onerror=ignore_missing)


def remove_or_warn(path: str) -> bool:
    """Remove a leftover file or directory, and return whether it was removed; log a warning on failure."""
    # Leftovers only take space: failing to remove one must not fail a finished save or a start.
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            remove_tree(path)
        else:
            os.remove(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        logger.warning("%s could not be removed (%s); the next start tries again.", path, error)
        return False
    return True


def replace_file(path: str, data: bytes) -> None:
    """Write `data` to `path` with an atomic rename, so that readers see the old or the new content."""
    # In the same directory, because a rename is atomic only within one file system.
    directory, name = os.path.split(os.path.abspath(path))
    temporary = os.path.join(directory, f".{name}-{uuid.uuid4().hex[:8]}")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            # Before the rename: else a power loss could leave the new name with an empty file.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)
        raise
    fsync_directory(directory)


def remove_unfinished_replacements(directory: str) -> list[str]:
    """Delete temporary files that a killed `replace_file` left in a directory; return their paths."""
    paths = [os.path.join(directory, name) for name in sorted(os.listdir(directory)) if _UNFINISHED.match(name)]
    # `replace_file` creates no directories, so a directory with such a name is not Forgather's.
    return [path for path in paths if not os.path.isdir(path) and remove_or_warn(path)]


def files_below(path: str) -> Iterator[str]:
    """Yield the relative paths of all files in a directory tree."""
    for directory, _, names in os.walk(path):
        for name in names:
            yield os.path.relpath(os.path.join(directory, name), path)
