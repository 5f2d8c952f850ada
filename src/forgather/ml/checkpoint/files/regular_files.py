"""Safe opening of checkpoint files: regular files only, no symlinks, no blocking on FIFOs or devices.

The content of a checkpoint directory is untrusted: any name can be a symlink or a FIFO. Every reader of checkpoint
files opens them here.
"""

import os
import stat

from forgather import _run_files
from forgather._run_files import IrregularFileError
from forgather.ml.checkpoint.errors import CheckpointCorruptError

SMALL_FILE_BYTES = 64 * 2**20
"""Largest manifest, metadata or index file that is read."""


def open_regular(path: str, *, follow: bool = False) -> int:
    """Open a regular file for reading and return its descriptor; raise `CheckpointCorruptError` for anything else.

    `follow=True` allows a symlink to a regular file, for directories of other programs (Hugging Face's cache).
    """
    try:
        return _run_files.open_regular(path, os.O_RDONLY, follow=follow)
    except IrregularFileError as error:
        raise CheckpointCorruptError(
            f"{path} is damaged: it is {error.kind}, but files of a checkpoint must be regular files"
        ) from error


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
