"""What connects ranks for small and urgent messages: a gloo group, and on one machine sockets.

A message over a socket lies in the other's buffer until it is looked at, and nobody is woken up for it, as the threads
of a gloo group are: for small messages that costs a tenth. A rank that is gone is noticed at once by whoever waits for it.
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
"""More would need too many connections, and too many messages where each rank writes to each other."""
_DEFAULT_TIMEOUT = timedelta(minutes=30)
_CONNECT_SECONDS = 30.0
_RANK = struct.Struct("q")


class RankLinks:
    """The links of this rank; `sockets` are by rank inside the group, or None where the group has to do."""

    def __init__(self, group: ProcessGroup, sockets: dict[int, socket.socket] | None = None) -> None:
        self.group = group
        self.sockets = sockets

    @classmethod
    def connect(cls, group: ProcessGroup) -> "RankLinks":
        """Connect the ranks of a gloo group as well as can be; collective."""
        peers = Peers(group)
        if peers.size > _MOST_RANKS or len(set(peers.gather(_machine()))) > 1:
            return cls(group)
        return cls(group, _connect_sockets(peers))

    def close(self) -> None:
        """Leave; the other ranks notice when they wait for this one."""
        for connection in (self.sockets or {}).values():
            with contextlib.suppress(OSError):
                # Also where a worker process has inherited it.
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


def read_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """So many bytes; ConnectionError when the other rank has left."""
    with telling_timeouts():
        message = connection.recv(num_bytes, socket.MSG_WAITALL)
        while len(message) < num_bytes:
            rest = connection.recv(num_bytes - len(message), socket.MSG_WAITALL)
            if not rest:
                raise left_error()
            message += rest
    return message


@contextlib.contextmanager
def telling_timeouts() -> Iterator[None]:
    """Say what the system means by a resource that is temporarily unavailable."""
    try:
        yield
    except BlockingIOError:
        seconds = _timeout().total_seconds()
        raise TimeoutError(f"another rank sent nothing for {seconds:g} seconds, the time limit of this job") from None


def left_error() -> ConnectionError:
    return ConnectionError("Connection closed by another rank")


def _connect_sockets(peers: Peers) -> dict[int, socket.socket] | None:
    """A socket for each of the others, through files that only this user can open; None where ranks cannot see them."""
    with contextlib.ExitStack() as stack:
        try:
            listener, path = stack.enter_context(_listener())
        except OSError:
            # No folder for temporary files, or one whose name is longer than those of sockets may be.
            path = ""
        paths = peers.gather(path)
        if not all(paths):
            return None
        try:
            sockets = {rank: _reach(paths[rank], peers.rank) for rank in range(peers.rank)}
        except OSError:
            # Ranks may be on one machine, and yet in containers of their own.
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
    # By the kernel rather than by Python, which would ask it twice for every message. A message may wait to be taken for
    # as long as an evaluation takes, so that only receiving has a limit.
    connection.setblocking(True)
    timeout = _timeout()
    limit = struct.pack("ll", int(timeout.total_seconds()), timeout.microseconds)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def _timeout() -> timedelta:
    return get_requested_timeout() or _DEFAULT_TIMEOUT


def _machine() -> str:
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return f"{socket.gethostname()} {file.read().strip()}"
    return socket.gethostname()
