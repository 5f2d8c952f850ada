"""Server of the control socket: one thread that waits in `select`, and hands requests to a function.

It never waits for a client: requests have a size limit and a time limit, answers are sent as fast as a client reads. No
number of clients keeps a new one out: a full server drops the oldest connection that has not sent its request, and limits
only how many clients wait for commands other than those in `_URGENT`.
The socket is for its owner only (mode 0600, and the credentials of each client are checked).
"""

import contextlib
import logging
import os
import re
import secrets
import selectors
import socket
import stat
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from forgather._control import messages
from forgather._control.address import SOCKET_NAME, is_trusted, peer_user, socket_status, usable_path

logger = logging.getLogger(__name__)

_MOST_CLIENTS = 128
_MOST_WAITING = 32
_URGENT = (messages.STATUS, messages.STOP, messages.ABORT)
"""Commands that no number of waiting clients keeps out."""
_BACKLOG = 1024
"""Connections that wait for this thread, such as those of a monitor while the job is stopped (SIGSTOP)."""
_SECONDS_TO_SPEAK = 10.0
"""Time for a client to send its request, and to read a part of the answer."""
_SECONDS_TO_CLOSE = 2.0
_SECONDS_TO_LINGER = 1.0
"""Time to discard what a client still sends after its answer. A close with unread bytes would destroy the answer."""
_TICK_SECONDS = 1.0
_TEMPORARY = re.compile(re.escape(SOCKET_NAME) + r"\.[0-9a-f]{8}")

Handle = Callable[[messages.Request, int], None]
"""Function of a request and its client's number; it calls `Server.send` now or later, from any thread."""


@dataclass
class _Client:
    connection: socket.socket
    deadline: float
    received: bytes = b""
    unsent: bytes = b""
    command: str | None = None
    """Command of its request, once that is received."""
    is_answered: bool = False


@dataclass
class _Letter:
    """Lines for a client; `is_last` closes the connection after them."""

    number: int
    lines: bytes
    is_last: bool = field(default=True)


class Server:
    """Listening socket in a directory, and the thread that serves it. `close` removes both."""

    def __init__(self, directory: str, handle: Handle, tick: Callable[[float], None]) -> None:
        """Create the socket; the caller holds the lock of the directory. `tick` is called about once a second."""
        self._directory = os.path.abspath(directory)
        self._handle = handle
        self._tick = tick
        self._clients: dict[int, _Client] = {}
        self._letters: deque[_Letter] = deque()
        self._number = 0
        self._is_closing = False
        self._listener = _listen(self._directory)
        status = socket_status(self._directory)
        self._inode = None if status is None else (status.st_dev, status.st_ino)
        # `send` wakes the thread through this pair.
        self._waking, self._woken = socket.socketpair()
        self._waking.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._woken, selectors.EVENT_READ, self._wake)
        _servers.add(self)
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._thread.start()

    def send(self, number: int, lines: bytes, is_last: bool = True) -> None:
        """Send lines to a client, from any thread. A client that has gone is ignored."""
        self._letters.append(_Letter(number, lines, is_last))
        self._notify()

    def close(self) -> None:
        """Remove the socket file, deliver the answers that are on their way, and end the thread."""
        self._remove()
        self._is_closing = True
        self._notify()
        self._thread.join(_SECONDS_TO_CLOSE + _TICK_SECONDS)

    def _notify(self) -> None:
        # A full buffer wakes the thread too. A closed pair belongs to a thread that has ended.
        with contextlib.suppress(BlockingIOError, OSError):
            self._waking.send(b"!")

    def _remove(self) -> None:
        """Delete the socket file, if it is still the one of this server."""
        with contextlib.suppress(OSError):
            status = socket_status(self._directory)
            if status is not None and (status.st_dev, status.st_ino) == self._inode:
                os.unlink(os.path.join(self._directory, SOCKET_NAME))

    def forget(self) -> None:
        """Close the descriptors in a forked child, such as a data worker: the job's end must close the socket."""
        self._selector.close()
        for one in (self._listener, self._waking, self._woken, *(one.connection for one in self._clients.values())):
            one.close()

    # --- thread

    def _run(self) -> None:
        try:
            deadline: float | None = None
            while deadline is None or (self._has_unsent() and time.monotonic() < deadline):
                self._look()
                if self._is_closing and deadline is None:
                    deadline = time.monotonic() + _SECONDS_TO_CLOSE
        except Exception:
            # An error here must not end training.
            logger.exception("The control socket of this job is closed after an error.")
            self._remove()
        finally:
            self._end()

    def _look(self) -> None:
        # New connections come last: the requests that have arrived are read before a client has to make room.
        for key, events in sorted(self._selector.select(_TICK_SECONDS), key=lambda one: one[0].data == self._accept):
            key.data(events)
        self._deliver()
        now = time.monotonic()
        self._tick(now)
        for number, client in list(self._clients.items()):
            is_slow = client.unsent or client.is_answered or client.command is None
            if is_slow and now > client.deadline:
                self._drop(number)

    def _has_unsent(self) -> bool:
        return bool(self._letters) or any(client.unsent for client in self._clients.values())

    def _end(self) -> None:
        _servers.discard(self)
        for number in list(self._clients):
            self._drop(number)
        self._selector.close()
        for one in (self._listener, self._waking, self._woken):
            one.close()

    def _accept(self, _: int) -> None:
        try:
            connection, _address = self._listener.accept()
        except OSError:
            # The client has gone, or this process has no free descriptor.
            return
        connection.setblocking(False)
        if len(self._clients) >= _MOST_CLIENTS:
            self._make_room()
        self._number += 1
        number = self._number
        self._clients[number] = _Client(connection, time.monotonic() + _SECONDS_TO_SPEAK)
        self._selector.register(connection, selectors.EVENT_READ, lambda events: self._serve(number, events))
        if not is_trusted(peer_user(connection)):
            self._answer(number, messages.failure(messages.REFUSED, "This job belongs to another user."))

    def _make_room(self) -> None:
        """Drop the oldest client that has not sent its request; else one that has its answer; else any."""

        def order(number: int) -> tuple[bool, bool, int]:
            client = self._clients[number]
            return client.command is not None, not client.is_answered, number

        oldest = min(self._clients, key=order)
        if self._clients[oldest].command is not None:
            text = "Too many clients wait for this job. It still carries out the request when it can."
            self._answer(oldest, messages.failure(messages.FAILED, text))
        if oldest in self._clients:
            self._drop(oldest)

    def _wake(self, _: int) -> None:
        self._woken.recv(4096)

    def _serve(self, number: int, events: int) -> None:
        client = self._clients.get(number)
        if client is not None and events & selectors.EVENT_WRITE:
            self._write(number, client)
        if number in self._clients and client is not None and events & selectors.EVENT_READ:
            self._read(number, client)

    def _read(self, number: int, client: _Client) -> None:
        try:
            part = client.connection.recv(messages.MOST_REQUEST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if not part:
            # A client that has gone; its request is still served.
            self._drop(number)
        elif client.command is None and not client.is_answered:
            client.received += part
            self._take_request(number, client)

    def _take_request(self, number: int, client: _Client) -> None:
        line, end, _rest = client.received.partition(b"\n")
        if len(line) > messages.MOST_REQUEST_BYTES:
            self._answer(number, messages.failure(messages.REFUSED, "The request is too long."))
        elif end:
            client.command, client.received = "", b""
            try:
                request = messages.Request.parse(line)
                self._require_room(request.command)
                client.command = request.command
                self._handle(request, number)
            except messages.BadRequest as error:
                self._answer(number, messages.failure(messages.REFUSED, str(error)))
            except Exception as error:
                # The state of the trainer may change while it is read.
                logger.debug("A request to the control socket failed.", exc_info=True)
                self._answer(number, messages.failure(messages.FAILED, f"{type(error).__name__}: {error}"))

    def _require_room(self, command: str) -> None:
        """Raise `BadRequest` if too many clients wait for commands that are not urgent."""
        limited = [one for one in self._clients.values() if one.command and one.command not in _URGENT]
        if command not in _URGENT and sum(not one.is_answered for one in limited) >= _MOST_WAITING:
            raise messages.BadRequest(f"{_MOST_WAITING} clients wait for this job already. Try again later.")

    def _deliver(self) -> None:
        while self._letters:
            letter = self._letters.popleft()
            self._answer(letter.number, letter.lines, letter.is_last)

    def _answer(self, number: int, lines: bytes, is_last: bool = True) -> None:
        client = self._clients.get(number)
        if client is None or client.is_answered:
            return
        client.unsent += lines
        client.is_answered = is_last
        client.deadline = time.monotonic() + _SECONDS_TO_SPEAK
        self._write(number, client)

    def _write(self, number: int, client: _Client) -> None:
        try:
            sent = client.connection.send(client.unsent) if client.unsent else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            self._drop(number)
            return
        client.unsent = client.unsent[sent:]
        if sent:
            client.deadline = time.monotonic() + _SECONDS_TO_SPEAK
        if not client.unsent and client.is_answered:
            # The client closes when it has read the end of the answer, and `_read` then drops it.
            client.deadline = time.monotonic() + _SECONDS_TO_LINGER
            with contextlib.suppress(OSError):
                client.connection.shutdown(socket.SHUT_WR)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.unsent else 0)
        key: Any = self._selector.get_key(client.connection)
        if key.events != events:
            self._selector.modify(client.connection, events, key.data)

    def _drop(self, number: int) -> None:
        client = self._clients.pop(number)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client.connection)
        client.connection.close()


def _listen(directory: str) -> socket.socket:
    """Return a listening socket in the directory, which replaces the socket of a killed job."""
    # Raises for a file of another kind, which is not ours to replace.
    socket_status(directory)
    _remove_temporary(directory)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    temporary = f"{SOCKET_NAME}.{secrets.token_hex(4)}"
    path = os.path.join(directory, temporary)
    try:
        # Before `bind`, so that the file never has another mode. Linux takes the mode from the socket.
        os.fchmod(listener.fileno(), 0o600)
        with usable_path(directory, temporary) as address:
            listener.bind(address)
        os.chmod(path, 0o600)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        os.rename(path, os.path.join(directory, SOCKET_NAME))
    except BaseException:
        listener.close()
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    return listener


def _remove_temporary(directory: str) -> None:
    """Delete sockets of jobs that were killed between `bind` and `rename`."""
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        if _TEMPORARY.fullmatch(name) and stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)


_servers: "weakref.WeakSet[Server]" = weakref.WeakSet()


def _forget_in_child() -> None:
    for server in list(_servers):
        server.forget()
    _servers.clear()


os.register_at_fork(after_in_child=_forget_in_child)
