"""One running job per output directory, enforced by a lock that the kernel drops when the job dies.

The lock is a POSIX record lock: forked data-loader workers do not inherit it, and it is gone the moment its process is,
SIGKILL included. Its price: a process loses it when it closes *any* descriptor of the lock file, so nothing in this
process may open that file but this module.
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

# The holder writes who it is just after it got the lock; a reader that comes in between waits this long for it.
_HOLDER_WAIT_SECONDS = 0.5

# Process id, device and inode of a lock file. While a lock is held its descriptor is open, so that its inode number
# cannot be given to another file. The process id keeps a forked child from taking its parent's lock for its own.
_Key = tuple[int, int, int]


@dataclass
class _Held:
    descriptor: int
    num_acquired: int = 1


_held: dict[_Key, _Held] = {}
_registry_mutex = threading.Lock()


def _forget_in_child() -> None:
    _held.clear()
    _registry_mutex.release()


# Without this, a child forked while another thread is in here would find the mutex locked for ever.
os.register_at_fork(
    before=_registry_mutex.acquire, after_in_parent=_registry_mutex.release, after_in_child=_forget_in_child
)


class OutputDirLock:
    """Keeps other jobs out of an output directory, which is created if need be.

    The same process may acquire the same directory again, through this or another object; it is free for others after
    as many releases. Of a distributed job, one rank acquires.
    """

    def __init__(self, output_dir: str | os.PathLike[str]) -> None:
        self._output_dir = os.fspath(output_dir)
        self._keys: list[_Key] = []

    def acquire(self) -> None:
        """Take the lock, or raise `OutputDirLockedError` at once if another process has it."""
        path = os.path.join(self._output_dir, LOCK_FILE_NAME)
        with _registry_mutex:
            try:
                make_directories(self._output_dir)
                self._keys.append(_acquire_again(path) or _acquire_first(path, self._output_dir))
            except OSError as error:
                raise _explained(error, self._output_dir) from error

    def release(self) -> None:
        """Undo one `acquire`; without one, or in a process forked since, this does nothing."""
        if not self._keys:
            return
        key = self._keys.pop()
        with _registry_mutex:
            held = _held.get(key)
            if held is None or key[0] != os.getpid():
                return
            held.num_acquired -= 1
            if held.num_acquired == 0:
                del _held[key]
                _give_up(held.descriptor, self._output_dir)

    @property
    def is_lost(self) -> bool:
        """Whether the lock file was removed, renamed or replaced since, so that another job may have taken its place."""
        path = os.path.join(self._output_dir, LOCK_FILE_NAME)
        return bool(self._keys) and self._keys[-1][0] == os.getpid() and not _is_still_at(path, self._keys[-1])

    def require_held(self) -> None:
        """Raise `OSError` when the lock was taken and is lost."""
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
    """Count one more user of a lock that this process holds; finds out without opening the file."""
    try:
        key = _key(os.lstat(path))
    except FileNotFoundError:
        return None
    if key not in _held:
        return None
    _held[key].num_acquired += 1
    return key


def _acquire_first(path: str, output_dir: str) -> _Key:
    while True:
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
    """Raise unless the file is one that this module wrote: taking the lock overwrites its content."""
    status = os.fstat(descriptor)
    is_plain = stat.S_ISREG(status.st_mode) and status.st_nlink <= 1 and status.st_size <= _MOST_HOLDER_BYTES
    if not is_plain or not _is_holder(os.pread(descriptor, _MOST_HOLDER_BYTES, 0)):
        raise OSError(errno.EEXIST, f"{path} exists and is not a lock file of ours, so it is left alone")


def _is_holder(content: bytes) -> bool:
    """Whether a lock file says who holds it, or nothing: it is empty when nobody does."""
    # One that was copied while it was being written may be cut short.
    return not content or content.startswith(b'{"host"')


def _give_up(descriptor: int, output_dir: str) -> None:
    """Empty and close the lock file, which stays: else two later jobs could lock two files of the same name."""
    try:
        os.ftruncate(descriptor, 0)
    except OSError as error:
        # A file system that turned read-only; the kernel drops the lock all the same.
        logger.warning("The lock file in %s could not be emptied: %s", output_dir, error.strerror)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, output_dir: str) -> None:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        raise OutputDirLockedError(_refusal(output_dir, _read_holder(descriptor))) from error


def _is_still_at(path: str, key: _Key) -> bool:
    """Whether the locked file is the one others will find: somebody may have removed it since it was opened."""
    try:
        return _key(os.lstat(path)) == key
    except (FileNotFoundError, NotADirectoryError):
        return False


def _key(status: os.stat_result) -> _Key:
    return os.getpid(), status.st_dev, status.st_ino


def _write_holder(descriptor: int) -> None:
    """Say who holds the lock, in place: a renamed-in file would be another file, without the lock."""
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
        f"{since}. Two jobs would delete and overwrite each other's checkpoints. Wait for that job, stop it, or give "
        "this one another output_dir. The lock goes away by itself when that process ends."
    )


def _explained(error: OSError, output_dir: str) -> OSError:
    """Keep the error's kind, and add what was attempted and what to change."""
    return OSError(
        error.errno,
        f"Cannot lock the output directory {output_dir!r} ({error.strerror}): checkpoints go there, so it has to be a "
        f"directory in which this user may create and write files (also {LOCK_FILE_NAME}), on a file system with "
        "POSIX locks. Fix its permissions or choose another output_dir.",
    )
