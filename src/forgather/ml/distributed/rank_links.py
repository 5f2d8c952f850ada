"""Links between ranks for small, latency-critical messages: a gloo group, and Unix sockets on one machine.

A socket message stays in the receive buffer until it is read, and wakes no thread. Gloo wakes its worker threads, so
that sockets take about a tenth of the time for small messages. A waiting rank notices a closed connection at once.
Number exchange and batch dispatch use these links.
"""

import contextlib
import os
import socket
import struct
import tempfile
from collections.abc import Iterator
from datetime import timedelta

from torch.distributed import ProcessGroup

from forgather.ml.distributed.agreement import Peers
from forgather.ml.distributed.environment import get_requested_timeout

_MOST_RANKS = 16
"""Limit for sockets: the number of connections and messages grows with the square of the number of ranks."""
_DEFAULT_TIMEOUT = timedelta(minutes=30)
_CONNECT_SECONDS = 30.0
_RANK = struct.Struct("q")


class RankLinks:
    """Links of this rank: a gloo group, and `sockets` by rank inside the group (None if only the group can be used)."""

    def __init__(self, group: ProcessGroup, sockets: dict[int, socket.socket] | None = None) -> None:
        self.group = group
        self.sockets = sockets

    @classmethod
    def connect(cls, group: ProcessGroup) -> "RankLinks":
        """Connect the ranks of a gloo group, by sockets where possible; collective."""
        peers = Peers(group)
        # Both conditions have the same result on every rank, so all ranks make the same choice.
        if peers.size > _MOST_RANKS or len(set(peers.gather(_machine()))) > 1:
            return cls(group)
        return cls(group, _connect_sockets(peers))

    def close(self) -> None:
        """Close the sockets; other ranks notice when they next wait for this rank."""
        for connection in (self.sockets or {}).values():
            with contextlib.suppress(OSError):
                # A worker process may have inherited the descriptor. `close` alone would leave the connection open
                # then.
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


def read_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """Read `num_bytes` bytes; raise ConnectionError if the other rank has left."""
    with telling_timeouts():
        message = connection.recv(num_bytes, socket.MSG_WAITALL)
        # MSG_WAITALL may still return fewer bytes, for example after a signal.
        while len(message) < num_bytes:
            rest = connection.recv(num_bytes - len(message), socket.MSG_WAITALL)
            if not rest:
                raise left_error()
            message += rest
    return message


@contextlib.contextmanager
def telling_timeouts() -> Iterator[None]:
    """Convert the EAGAIN error of an expired socket timeout into a TimeoutError that names the limit."""
    try:
        yield
    except BlockingIOError:
        # A blocking socket raises this only when SO_RCVTIMEO has expired.
        seconds = _timeout().total_seconds()
        raise TimeoutError(f"no message from another rank for {seconds:g} seconds, the timeout of this job") from None


def left_error() -> ConnectionError:
    return ConnectionError("Connection closed by another rank")


def _connect_sockets(peers: Peers) -> dict[int, socket.socket] | None:
    """Connect a Unix socket to each other rank; return None on every rank if any rank cannot connect.

    The socket files are in a temporary directory that only this user can open.
    """
    # Every rank reaches both gathers, also after an error, so that all ranks fall back to the gloo group together.
    with contextlib.ExitStack() as stack:
        try:
            listener, path = stack.enter_context(_listener())
        except OSError:
            # No temporary directory, or a path above the length limit of Unix sockets (about 100 bytes).
            path = ""
        paths = peers.gather(path)
        if not all(paths):
            return None
        # Each rank connects to all lower ranks, then accepts all higher ranks. The listen backlog holds the pending
        # connections, so no rank has to accept while it connects.
        try:
            sockets = {rank: _reach(paths[rank], peers.rank) for rank in range(peers.rank)}
        except OSError:
            # Ranks on one machine may run in separate containers, without a common file system.
            sockets = None
        if not all(peers.gather(sockets is not None)):
            return None
        assert sockets is not None
        for _ in range(peers.rank + 1, peers.size):
            connection, _ = listener.accept()
            (rank,) = _RANK.unpack(read_exactly(connection, _RANK.size))
            sockets[rank] = connection
    for connection in sockets.values():
        _limit_waiting(connection)
    return dict(sorted(sockets.items()))


@contextlib.contextmanager
def _listener() -> Iterator[tuple[socket.socket, str]]:
    with (
        tempfile.TemporaryDirectory(prefix="forgather-") as directory,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
    ):
        path = os.path.join(directory, "rank")
        listener.bind(path)
        listener.listen(_MOST_RANKS)
        listener.settimeout(_CONNECT_SECONDS)
        yield listener, path


def _reach(path: str, own_rank: int) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_CONNECT_SECONDS)
    connection.connect(path)
    connection.sendall(_RANK.pack(own_rank))
    return connection


def _limit_waiting(connection: socket.socket) -> None:
    # SO_RCVTIMEO is a timeout of the kernel. A timeout of Python would cost a second system call per message. Sending
    # has no timeout, because a message may stay unread for as long as an evaluation takes.
    connection.setblocking(True)
    timeout = _timeout()
    limit = struct.pack("ll", int(timeout.total_seconds()), timeout.microseconds)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def _timeout() -> timedelta:
    return get_requested_timeout() or _DEFAULT_TIMEOUT


def _machine() -> str:
    # Host names are not unique across machines, and boot IDs are equal in all containers of a machine: combine them.
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return f"{socket.gethostname()} {file.read().strip()}"
    return socket.gethostname()
