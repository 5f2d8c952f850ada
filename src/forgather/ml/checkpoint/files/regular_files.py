"""Safe opening of checkpoint files: regular files only, no symlinks, no blocking on FIFOs or devices.

The content of a checkpoint directory is untrusted: any name can be a symlink or a FIFO. Every reader of checkpoint
files opens them here.
"""

import errno
import os
import stat

from forgather.ml.checkpoint.errors import CheckpointCorruptError

SMALL_FILE_BYTES = 64 * 2**20
"""Largest manifest, metadata or index file that is read."""

_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: str, *, follow: bool = False) -> int:
    """Open a regular file for reading and return its descriptor; raise `CheckpointCorruptError` for anything else.

    `follow=True` allows a symlink to a regular file, for directories of other programs (Hugging Face's cache).
    """
    # Check before opening, because opening a FIFO blocks and opening a device may have an effect. Check the descriptor
    # again afterwards, because the path may have been replaced in between (TOCTOU).
    _require_regular(path, (os.stat if follow else os.lstat)(path))
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _irregular(path, _KINDS[stat.S_IFLNK]) from error
        raise
    try:
        _require_regular(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _require_regular(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise _irregular(path, _KINDS.get(stat.S_IFMT(status.st_mode), "not a regular file"))


def _irregular(path: str, kind: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(f"{path} is damaged: it is {kind}, but files of a checkpoint must be regular files")


def read_small_file(path: str, limit: int = SMALL_FILE_BYTES, *, follow: bool = False) -> bytes:
    """Read a regular file of at most `limit` bytes; raise `CheckpointCorruptError` if it is larger."""
    with open(open_regular(path, follow=follow), "rb") as file:
        # Not by fstat: the file may grow while it is read.
        data = file.read(limit + 1)
    if len(data) > limit:
        raise CheckpointCorruptError(f"{path} is damaged: it has more than {limit:,} bytes, the limit for such files")
    return data


def is_real_directory(path: str) -> bool:
    """Return whether a path is a directory and not a symlink to a directory."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def path_inside(directory: str, relative_path: str) -> str:
    """Join a manifest's relative path to its directory; raise `CheckpointCorruptError` for a symlinked folder."""
    # O_NOFOLLOW protects only the last component of a path.
    folder = directory
    for name in os.path.dirname(relative_path).split(os.sep):
        folder = os.path.join(folder, name)
        if name and os.path.lexists(folder) and not is_real_directory(folder):
            raise CheckpointCorruptError(f"{folder} is damaged: folders of a checkpoint must be real directories")
    return os.path.join(directory, relative_path)
