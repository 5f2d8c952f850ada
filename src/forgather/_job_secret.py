"""Job secret: signs what processes of a job tell each other through a store, which any process that reaches it can write.

The first launcher of a user makes the secret, in a file that only this user can read. A shared home directory carries it to
the other nodes; without one, FORGATHER_JOB_SECRET does. Values without a valid signature count as missing. Imports no torch.
"""

import hashlib
import hmac
import os
import secrets
import stat
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

SECRET_VARIABLE = "FORGATHER_JOB_SECRET"
_FILE = "forgather/job-secret"
_FEWEST_CHARACTERS = 16
_MOST_CHARACTERS = 4096
_SIGNATURE_BYTES = 32
_POLL_SECONDS = 0.05


def job_secret() -> bytes:
    """Return the key of this user's jobs: from FORGATHER_JOB_SECRET, or from a file that is made if it is missing."""
    text = os.environ.get(SECRET_VARIABLE)
    where = SECRET_VARIABLE
    if text is None:
        path = _path()
        text, where = _read(path), str(path)
    if len(text) < _FEWEST_CHARACTERS:
        raise ValueError(
            f"The job secret in {where} has {len(text)} characters, and needs at least {_FEWEST_CHARACTERS} that nobody can "
            "guess, such as those of: openssl rand -hex 32"
        )
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()


def describe_source() -> str:
    """Return where this process has its secret from, for messages."""
    return SECRET_VARIABLE if SECRET_VARIABLE in os.environ else str(_path())


def given_secret() -> bytes:
    """Return the key in FORGATHER_JOB_SECRET, which workers inherit from the launcher; an empty one if it is not set."""
    return job_secret() if SECRET_VARIABLE in os.environ else b""


def hand_to_workers() -> bytes:
    """Return the secret of this user's jobs, and let the processes that this one starts have it."""
    key = job_secret()
    if SECRET_VARIABLE not in os.environ:
        os.environ[SECRET_VARIABLE] = _read(_path())
    return key


def _path() -> Path:
    try:
        folder = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    except RuntimeError as error:
        raise ValueError(f"There is no home directory for the job secret ({error}). Set {SECRET_VARIABLE}.") from None
    return Path(folder) / _FILE


def _read(path: Path) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        _make(path)
        return _read(path)
    except OSError as error:
        raise ValueError(
            f"The job secret cannot be read: {error}. Set {SECRET_VARIABLE}, or replace the file."
        ) from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        os.close(descriptor)
        raise ValueError(
            f"{path} is no secret: it must be a regular file that belongs to you and that only you can read. Delete it, or "
            f"make it so: chmod 600 {path}. Where the file system knows no owners or modes, set {SECRET_VARIABLE}."
        )
    with open(descriptor, encoding="ascii", errors="surrogateescape") as file:
        return file.read(_MOST_CHARACTERS).strip()


def _make(path: Path) -> None:
    """Write a new secret, unless another launcher does it at the same time."""
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "w") as file:
                file.write(f"{secrets.token_hex(32)}\n")
                file.flush()
                os.fsync(descriptor)
            # Not a rename: the launcher that comes second must not replace a secret that is in use.
            os.link(new, path)
        except FileExistsError:
            pass
        finally:
            os.unlink(new)
    except OSError as error:
        raise ValueError(
            f"No job secret can be written to {path}: {error.strerror}. Set {SECRET_VARIABLE} to the same text on all nodes, "
            "such as the output of: openssl rand -hex 32"
        ) from None


def seal(key: bytes, name: str, content: bytes) -> bytes:
    """Return the content behind its signature, which is valid under this name only."""
    return _signature(key, name, content) + content


def unseal(key: bytes, name: str, message: bytes) -> bytes | None:
    """Return the content of a sealed message; None if somebody without the key wrote it, or under another name."""
    signature, content = message[:_SIGNATURE_BYTES], message[_SIGNATURE_BYTES:]
    return content if hmac.compare_digest(signature, _signature(key, name, content)) else None


def _signature(key: bytes, name: str, content: bytes) -> bytes:
    label = name.encode()
    return hmac.digest(key, len(label).to_bytes(8, "big") + label + content, "sha256")


class SealedStore:
    """Store of torch.distributed with sealed values; a value with a wrong signature counts as missing.

    It has the methods that the launcher's agent calls. `context` distinguishes jobs and rounds, so that a value of one
    cannot be played back in another. Counters (`add`) are not sealed: the server computes them.
    """

    def __init__(self, store: Any, key: bytes, context: str = "") -> None:
        self._store = store
        self._key = key
        self._context = context

    @property
    def timeout(self) -> timedelta:
        limit: timedelta = self._store.timeout
        return limit

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    def set(self, name: str, value: str | bytes) -> None:
        content = value if isinstance(value, bytes) else value.encode()
        self._store.set(name, seal(self._key, self._label(name), content))

    def find(self, name: str) -> bytes | None:
        """Return a value at once; None if there is none."""
        return self._opened(name) if self._store.check([name]) else None

    def is_set(self, name: str) -> bool:
        """Return whether there is a value, signed or not."""
        return bool(self._store.check([name]))

    def get(self, name: str, timeout: timedelta | None = None) -> bytes:
        """Return a value, and wait for it up to the timeout of the store."""
        from torch.distributed import DistStoreError

        limit = timeout or self.timeout
        deadline = time.monotonic() + limit.total_seconds()
        self._store.wait([name], limit)
        while (found := self.find(name)) is None:
            if time.monotonic() > deadline:
                raise DistStoreError(
                    f"The value of {name!r} in the store of the job is not signed with the secret of this job: another program "
                    "has written it, or the nodes have different secrets."
                )
            time.sleep(_POLL_SECONDS)
        return found

    def multi_set(self, names: Sequence[str], values: Sequence[str | bytes]) -> None:
        for name, value in zip(names, values, strict=True):
            self.set(name, value)

    def multi_get(self, names: Sequence[str]) -> list[bytes]:
        return [self.get(name) for name in names]

    def wait(self, names: Sequence[str], timeout: timedelta | None = None) -> None:
        for name in names:
            self.get(name, timeout)

    def check(self, names: Sequence[str]) -> bool:
        return all(self.find(name) is not None for name in names)

    def add(self, name: str, number: int) -> int:
        total: int = self._store.add(name, number)
        return total

    def _opened(self, name: str) -> bytes | None:
        return unseal(self._key, self._label(name), self._store.get(name))

    def _label(self, name: str) -> str:
        return f"{self._context}/{name}"
