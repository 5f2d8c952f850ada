"""File lock that allows one running job per output directory; the kernel releases it when the job dies.

It is a POSIX record lock (`fcntl.lockf`): forked data-loader workers do not inherit it, and it ends with its process,
also after SIGKILL. A process loses such a lock when it closes *any* descriptor of the file, so only this module may
open the lock file. `storage.OutputDirectory` acquires it.
"""

import errno
import fcntl
import json
import logging
import os
import socket
import stat
import threading
import time
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import Any

from forgather.ml.checkpoint.errors import OutputDirLockedError
from forgather.ml.checkpoint.files.durable import make_directories

logger = logging.getLogger(__name__)

LOCK_FILE_NAME = ".forgather.lock"
_MOST_HOLDER_BYTES = 4096

# The holder writes its host and process id just after it got the lock. A reader in between waits this long for them.
_HOLDER_WAIT_SECONDS = 0.5

# Process id, device and inode of a lock file. A held lock has an open descriptor, so its inode number cannot be reused
# for another file. The process id keeps a forked child from using its parent's entry.
_Key = tuple[int, int, int]


@dataclass
class _Held:
    descriptor: int
    num_acquired: int = 1


# POSIX locks never conflict within one process, so repeated acquisitions are counted here.
_held: dict[_Key, _Held] = {}
_registry_mutex = threading.Lock()


def _forget_in_child() -> None:
    # A child does not inherit record locks, only the descriptors.
    _held.clear()
    _registry_mutex.release()


# Without this, a child that is forked while another thread holds the mutex would find it locked forever.
os.register_at_fork(
    before=_registry_mutex.acquire, after_in_parent=_registry_mutex.release, after_in_child=_forget_in_child
)


class OutputDirLock:
    """Reentrant lock of an output directory against other jobs. The directory is created if it does not exist.

    The same process may acquire the same directory again, through this or another object. Other processes can have it
    after the same number of releases. In a distributed job, one rank per directory acquires it.
    """

    def __init__(self, output_dir: str | os.PathLike[str]) -> None:
        self._output_dir = os.fspath(output_dir)
        self._keys: list[_Key] = []

    def acquire(self) -> None:
        """Acquire the lock, or raise `OutputDirLockedError` at once if another process holds it."""
        path = os.path.join(self._output_dir, LOCK_FILE_NAME)
        with _registry_mutex:
            try:
                make_directories(self._output_dir)
                self._keys.append(_acquire_again(path) or _acquire_first(path, self._output_dir))
            except OSError as error:
                raise _explained(error, self._output_dir) from error

    def release(self) -> None:
        """Undo one `acquire`. Do nothing without an `acquire`, or in a process forked after it."""
        if not self._keys:
            return
        key = self._keys.pop()
        with _registry_mutex:
            # A forked child must not empty its parent's lock file.
            held = _held.get(key)
            if held is None or key[0] != os.getpid():
                return
            held.num_acquired -= 1
            if held.num_acquired == 0:
                del _held[key]
                _give_up(held.descriptor, self._output_dir)

    @property
    def is_lost(self) -> bool:
        """Whether the lock file was removed, renamed or replaced, so that another job may have locked a new one."""
        path = os.path.join(self._output_dir, LOCK_FILE_NAME)
        return bool(self._keys) and self._keys[-1][0] == os.getpid() and not _is_still_at(path, self._keys[-1])

    def require_held(self) -> None:
        """Raise `OSError` if the lock was acquired and is lost."""
        if self.is_lost:
            raise OSError(
                f"the output directory {self._output_dir!r}, or its lock file, was removed or renamed while this job was "
                "running, so another job may use it now. Restore it and start again, or choose another output_dir."
            )

    def __enter__(self) -> "OutputDirLock":
        self.acquire()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


def _acquire_again(path: str) -> _Key | None:
    """Count one more user of a lock that this process holds; return None if it holds none."""
    try:
        # `lstat` instead of `open`: closing a second descriptor would release the lock.
        key = _key(os.lstat(path))
    except FileNotFoundError:
        return None
    # The inode identifies the lock, so two paths to the same directory count as one.
    if key not in _held:
        return None
    _held[key].num_acquired += 1
    return key


def _acquire_first(path: str, output_dir: str) -> _Key:
    # Retry if the file was removed between open and lock: this lock would be on a file that other jobs never open.
    while True:
        # O_NOFOLLOW: taking the lock overwrites the file. O_NONBLOCK: opening a special file could block.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(path, flags, 0o666)
        try:
            _require_lock_file(descriptor, path)
            _lock(descriptor, output_dir)
            _write_holder(descriptor)
            key = _key(os.fstat(descriptor))
            is_current = _is_still_at(path, key)
        except BaseException:
            os.close(descriptor)
            raise
        if is_current:
            _held[key] = _Held(descriptor)
            return key
        os.close(descriptor)


def _require_lock_file(descriptor: int, path: str) -> None:
    """Raise `OSError` unless this module wrote the file: taking the lock overwrites its content."""
    # A second hard link could be a user's file under another name.
    status = os.fstat(descriptor)
    is_plain = stat.S_ISREG(status.st_mode) and status.st_nlink <= 1 and status.st_size <= _MOST_HOLDER_BYTES
    if not is_plain or not _is_holder(os.pread(descriptor, _MOST_HOLDER_BYTES, 0)):
        raise OSError(errno.EEXIST, f"{path} exists but is not a Forgather lock file, so it is not overwritten")


def _is_holder(content: bytes) -> bool:
    """Return whether the content is a lock file's: empty, or the description of a holder."""
    # Only the start is compared, because a copy made during the write may be cut short.
    return not content or content.startswith(b'{"host"')


def _give_up(descriptor: int, output_dir: str) -> None:
    """Empty and close the lock file, but keep it: otherwise two later jobs could lock two files of the same name."""
    try:
        os.ftruncate(descriptor, 0)
    except OSError as error:
        # For example, the file system became read-only. The kernel still releases the lock on close.
        logger.warning("The lock file in %s could not be emptied: %s", output_dir, error.strerror)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, output_dir: str) -> None:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # POSIX allows either of the two for a lock that another process holds.
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        raise OutputDirLockedError(_refusal(output_dir, _read_holder(descriptor))) from error


def _is_still_at(path: str, key: _Key) -> bool:
    """Return whether the locked file is still at `path`, where other jobs look for it."""
    try:
        return _key(os.lstat(path)) == key
    except (FileNotFoundError, NotADirectoryError):
        return False


def _key(status: os.stat_result) -> _Key:
    return os.getpid(), status.st_dev, status.st_ino


def _write_holder(descriptor: int) -> None:
    """Write host, process id and time into the lock file, in place: an atomic rename would replace the locked inode."""
    holder = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(holder).encode(), 0)


def _read_holder(descriptor: int) -> dict[str, Any]:
    deadline = time.monotonic() + _HOLDER_WAIT_SECONDS
    while True:
        try:
            holder = json.loads(os.pread(descriptor, _MOST_HOLDER_BYTES, 0))
        except ValueError:
            # The holder has the lock but has not written its description yet.
            holder = None
        if isinstance(holder, dict):
            return holder
        if time.monotonic() > deadline:
            return {}
        time.sleep(0.02)


def _refusal(output_dir: str, holder: dict[str, Any]) -> str:
    host, pid, since = (holder.get(name, "unknown") for name in ("host", "pid", "since"))
    return (
        f"The output directory {output_dir!r} is in use by another running job: process {pid} on host {host}, since "
        f"{since}. Two jobs would delete and overwrite each other's checkpoints. Wait for that job, stop it, or choose "
        "another output_dir. The lock is released when that process ends."
    )


def _explained(error: OSError, output_dir: str) -> OSError:
    """Return an error with the same errno that names the directory and a remedy."""
    return OSError(
        error.errno,
        f"Cannot lock the output directory {output_dir!r} ({error.strerror}). It must be a directory where this user "
        f"may create and write files (including {LOCK_FILE_NAME}), on a file system with POSIX locks. Fix its "
        "permissions or choose another output_dir.",
    )
