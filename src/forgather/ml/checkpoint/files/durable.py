"""File-system operations that are on disk when they return."""

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
# The names that `replace_file` gives to files it has not finished.
_UNFINISHED = re.compile(r"\.(checkpoint_manifest|checkpoint_metadata|eval_metrics)\.json-[0-9a-f]{8}$")
# What the system answers when it, or this file system, has no atomic exchange.
_EXCHANGE_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


def fsync_directory(path: str) -> None:
    """Make the entries of a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(path: str) -> None:
    """Make the entries of a directory and of all directories below it durable."""
    for directory, _, _ in os.walk(path, topdown=False):
        fsync_directory(directory)


def make_directories(path: str) -> None:
    """`os.makedirs(exist_ok=True)` whose new entries are durable."""
    missing = []
    current = os.path.abspath(path)
    while not os.path.isdir(current):
        missing.append(current)
        current = os.path.dirname(current)
    for directory in reversed(missing):
        _make_directory(directory)
        fsync_directory(os.path.dirname(directory))


def make_parents_below(root: str, relative_path: str) -> None:
    """Make the directories of a file inside `root`, but not `root` itself: it may be gone because others gave it up."""
    current = root
    for name in os.path.dirname(relative_path).split(os.sep):
        if name:
            current = os.path.join(current, name)
            _make_directory(current)


def _make_directory(path: str) -> None:
    try:
        os.mkdir(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def exchange(first: str, second: str) -> bool:
    """Swap two directory entries in one atomic operation; False where the system has none."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    if libc.renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _EXCHANGE_UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), second)


def remove_tree(path: str) -> None:
    """Delete a directory; entries that others delete at the same time do not count as errors."""

    def ignore_missing(_function: object, _path: str, error_info: tuple[type, BaseException, object]) -> None:
        if not isinstance(error_info[1], FileNotFoundError):
            raise error_info[1]

    shutil.rmtree(path, onerror=ignore_missing)


def remove_or_warn(path: str) -> bool:
    """Remove what is in nobody's way: failing at that must not fail a save that is done, or a start."""
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
    """Put `data` at `path` so that readers see the old content or the new, never a part."""
    directory, name = os.path.split(os.path.abspath(path))
    temporary = os.path.join(directory, f".{name}-{uuid.uuid4().hex[:8]}")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)
        raise
    fsync_directory(directory)


def remove_unfinished_replacements(directory: str) -> list[str]:
    """Delete what a `replace_file` that was killed left in a directory; returns the paths."""
    paths = [os.path.join(directory, name) for name in sorted(os.listdir(directory)) if _UNFINISHED.match(name)]
    # `replace_file` makes no directories: one of such a name is somebody else's.
    return [path for path in paths if not os.path.isdir(path) and remove_or_warn(path)]


def files_below(path: str) -> Iterator[str]:
    """Relative paths of all files in a directory tree."""
    for directory, _, names in os.walk(path):
        for name in names:
            yield os.path.relpath(os.path.join(directory, name), path)
