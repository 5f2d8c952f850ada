"""Files of a run: opened so that nothing in an output directory leads elsewhere, blocks, or fills the memory.

An output directory may come from somebody else: any name in it can be a symbolic link, a hard link, a FIFO or a device, and
any file can have terabytes. Everything that reads or appends to a file of a run opens it here, and whole files are replaced
by `replace_file`, whose rename replaces a link itself. The output directory may be a link: the user names it.
Imports no torch.
"""

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from typing import IO

logger = logging.getLogger(__name__)

MOST_LINE_BYTES = 2**20
"""Longest line that is read: the longest ones that are written have a few kilobytes."""
MOST_LOG_BYTES = 17 * 2**20
"""Bytes that are read from the end of a log: a run record, which is thinned beyond 16 MiB, and its last line."""
MOST_LOG_LINES = 100_000
"""Lines that are read from the end of a log. They bind for lines of less than 180 bytes; log lines of a run have 200 to 300."""
_MOST_COPIED_BYTES = 2**30
_BLOCK_BYTES = 2**16

_FLAGS = {
    "rb": os.O_RDONLY,
    "ab+": os.O_RDWR | os.O_APPEND | os.O_CREAT,
    "wb": os.O_WRONLY | os.O_CREAT,
    "rb+": os.O_RDWR,
}
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class IrregularFileError(OSError):
    """A file that is not what its reader needs: a regular file. `kind` says what it is."""

    def __init__(self, path: str, kind: str) -> None:
        super().__init__(errno.EINVAL, f"it is {kind}, but must be a regular file", path)
        self.kind = kind

    def __str__(self) -> str:
        return f"{self.filename} is not opened: {self.strerror}. Delete it, or copy what it stands for"


def open_regular(path: str, flags: int, *, follow: bool = False, folder: int | None = None, named: str = "") -> int:
    """Open a regular file and return its descriptor; raise `IrregularFileError` for anything else.

    `follow=True` allows a symbolic link to a regular file. `folder` is the descriptor that a relative path starts at, and
    `named` is the path in errors.
    """
    named = named or path
    # Look before opening, because opening a FIFO blocks and opening a device may have an effect. Look at the descriptor
    # again afterwards, because the path may have been replaced in between.
    try:
        _require_regular(named, os.stat(path, dir_fd=folder, follow_symlinks=follow))
    except FileNotFoundError as error:
        if not flags & os.O_CREAT:
            raise FileNotFoundError(error.errno, error.strerror, named) from None
    safe = flags | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, safe, 0o666, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise IrregularFileError(named, _KINDS[stat.S_IFLNK]) from error
        raise type(error)(error.errno, error.strerror, named) from None
    try:
        _require_regular(named, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _require_regular(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise IrregularFileError(path, _KINDS.get(stat.S_IFMT(status.st_mode), "a special file"))


def open_in_run(folder: str, name: str, mode: str = "rb") -> IO[bytes]:
    """Open a file of a run; `name` may have folders, none of which may be a link. Modes: rb, ab+, wb, rb+.

    A file with several hard links is refused too: another name of it may be outside the run.
    """
    path = os.path.join(folder, name)
    with _folder_of(folder, name) as (place, base):
        return _open_in(place, base, path, mode)


@contextlib.contextmanager
def _folder_of(folder: str, name: str) -> Iterator[tuple[int, str]]:
    """Open the folder of a file of a run; yields its descriptor, and the name of the file in it."""
    *folders, base = name.split(os.sep)
    place = os.open(folder or os.curdir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in folders:
            inner = _open_folder(part, place, os.path.join(folder, name))
            os.close(place)
            place = inner
        yield place, base
    finally:
        os.close(place)


def _open_in(place: int, base: str, path: str, mode: str) -> IO[bytes]:
    descriptor = open_regular(base, _FLAGS[mode], folder=place, named=path)
    try:
        if os.fstat(descriptor).st_nlink > 1:
            raise IrregularFileError(path, "a file with several hard links")
        if mode == "wb":
            # Not O_TRUNC: it would empty the file before the checks.
            os.ftruncate(descriptor, 0)
        return open(path, mode, opener=lambda *_: descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def check_in_run(folder: str, *names: str) -> None:
    """Raise `IrregularFileError` for a link, or a file that is no regular one, at a name where a library will write."""
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            open_in_run(folder, name).close()


def _open_folder(name: str, place: int, path: str) -> int:
    try:
        return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise IrregularFileError(path, f"below {name}, which is not a real folder") from None
        raise type(error)(error.errno, error.strerror, path) from None


def make_folder_in_run(folder: str, *names: str) -> str:
    """Make a folder of a run and its parents, and return its path; raise `IrregularFileError` if one of them is a link."""
    os.makedirs(folder, exist_ok=True)
    for name in names:
        folder = os.path.join(folder, name)
        try:
            os.mkdir(folder)
        except FileExistsError:
            mode = os.lstat(folder).st_mode
            if not stat.S_ISDIR(mode):
                kind = _KINDS.get(stat.S_IFMT(mode), "a file")
                raise NotADirectoryError(
                    errno.ENOTDIR, f"it is {kind}, but must be a folder of the run: delete it", folder
                ) from None
    return folder


def append_line(folder: str, name: str, line: str) -> int:
    """Append a line to a log, and return the size of the file. A kill leaves at most one incomplete line, at the end."""
    # Opened for each line: on network file systems, other machines see the line only after close. One write in append
    # mode, so that lines of several processes do not mix.
    with open_in_run(folder, name, "ab+") as file:
        is_torn = file.seek(0, os.SEEK_END) > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
        file.write(b"\n" * is_torn + line.encode() + b"\n")
        return file.tell()


def remove_lines(folder: str, name: str, is_wanted: Callable[[bytes], bool]) -> None:
    """Remove the other lines from the end of a log; lines that `last_lines` leaves out stay.

    A kill leaves the old content or the new one.
    """
    path = os.path.join(folder, name)
    with _folder_of(folder, name) as (place, base), _open_in(place, base, path, "rb+") as file:
        removed = [(begin, begin + len(line)) for begin, line in last_lines(file) if not is_wanted(line)]
        size = file.seek(0, os.SEEK_END)
        while removed and removed[-1][1] == size:
            size = removed.pop()[0]
        if removed:
            kept = zip([0, *(end for _, end in removed)], [*(begin for begin, _ in removed), size], strict=True)
            _replace_by_parts(file, kept, place, base)
        else:
            # The usual case: the unwanted lines are the last ones, and a long log needs no copy.
            file.truncate(size)


def _replace_by_parts(file: IO[bytes], parts: Iterable[tuple[int, int]], place: int, base: str) -> None:
    """Replace a file in a folder by parts of itself, with an atomic rename."""
    status = os.fstat(file.fileno())
    if status.st_size > _MOST_COPIED_BYTES:
        most = f"{_MOST_COPIED_BYTES:,}"
        raise OSError(errno.EFBIG, f"it has more than {most} bytes, and lines in its middle must be removed", file.name)
    # A fixed name, so that kills do not leave one file each.
    temporary = f".{base}-new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary, dir_fd=place)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=place)
    try:
        with open(descriptor, "wb") as new:
            os.fchmod(descriptor, stat.S_IMODE(status.st_mode))
            for begin, end in parts:
                file.seek(begin)
                while begin < end and (block := file.read(min(end - begin, MOST_LINE_BYTES))):
                    begin += new.write(block)
            new.flush()
            os.fsync(descriptor)
        os.replace(temporary, base, src_dir_fd=place, dst_dir_fd=place)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=place)
        raise
    os.fsync(place)


def last_lines(file: IO[bytes], most_bytes: int = MOST_LOG_BYTES) -> Iterator[tuple[int, bytes]]:
    """Yield offset and content of the lines at the end of a file, with their line breaks.

    Lines of more than a megabyte are left out.
    """
    size = file.seek(0, os.SEEK_END)
    offset, num_lines = size, 0
    while offset > max(size - most_bytes, 0) and num_lines < MOST_LOG_LINES:
        before = max(offset - _BLOCK_BYTES, size - most_bytes, 0)
        file.seek(before)
        num_lines += file.read(offset - before).count(b"\n")
        offset = before
    file.seek(offset)
    is_tail = offset > 0
    if is_tail:
        # Lines that are read take far more time and memory than their bytes.
        logger.warning(
            "%s has %s bytes. Only the last %s are read; what was logged before is left out.",
            *(file.name, f"{size:,}", f"{size - offset:,}"),
        )
    while line := file.readline(MOST_LINE_BYTES):
        begin, offset = offset, offset + len(line)
        is_long = False
        while not line.endswith(b"\n") and (rest := file.readline(MOST_LINE_BYTES)):
            line, offset, is_long = rest, offset + len(rest), True
        # The first line of a tail may be the end of a longer one.
        if not is_long and not is_tail:
            yield begin, line
        is_tail = False


def read_at_most(file: IO[bytes], most_bytes: int) -> bytes:
    """Return the content of a file; raise `OSError` if it has more bytes."""
    # Not by fstat: the file may grow while it is read.
    content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes, the limit for such files", file.name)
    return content
