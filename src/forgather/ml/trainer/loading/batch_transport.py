"""Transport of serialised batches from the reading rank to other ranks: sockets on one machine, otherwise gloo.

Messages to a rank arrive in the order of sending. `DataloaderDispatcher` creates one sender or one receiver per rank.
"""

import contextlib
import itertools
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from forgather.ml.distributed.agreement import DistributedError
from forgather.ml.distributed.rank_links import RankLinks, left_error, read_exactly, telling_timeouts
from forgather.ml.distributed.rank_messages import LENGTH_BYTES, Pieces, length_of, packed

_FIRST_CAPACITY = 2**12
_DURING = "loading a batch"
_MOST_PIECES = 512


class Sender(Protocol):
    """Sender of messages to other ranks."""

    def send(self, messages: Sequence[Pieces | None]) -> None:
        """Send one message to the ranks of each shard; None for a shard of this rank only."""

    def flush(self) -> None:
        """Wait until all messages are sent."""


class Receiver(Protocol):
    """Receiver of messages from the reading rank."""

    def receive(self) -> Tensor: ...

    def expect_more(self) -> None:
        """Prepare for another message, which can then arrive while this rank trains."""


def make_sender(links: RankLinks, parts: list[list[int]]) -> Sender:
    """Return the sender for these links; each list of `parts` holds the ranks that get the same message."""
    others = [[rank for rank in ranks if rank != dist.get_rank()] for ranks in parts]
    if links.sockets is None:
        return _GroupSender(links.group, others)
    sockets = links.sockets
    return _SocketSender([[sockets[dist.get_group_rank(links.group, rank)] for rank in ranks] for ranks in others])


def make_receiver(links: RankLinks, source: int, pins_memory: bool) -> Receiver:
    """Return the receiver for these links; `pins_memory` if the batches are copied to an accelerator afterwards."""
    if links.sockets is None:
        return _GroupReceiver(links.group, source, pins_memory)
    return _SocketReceiver(links.sockets[dist.get_group_rank(links.group, source)], pins_memory)


class _SocketSender:
    def __init__(self, connections: list[list[socket.socket]]) -> None:
        self._connections = connections

    def send(self, messages: Sequence[Pieces | None]) -> None:
        for message, connections in zip(messages, self._connections, strict=True):
            for connection in connections:
                assert message is not None
                with _contact():
                    _send_pieces(connection, message)

    def flush(self) -> None:
        """Do nothing: the operating system has accepted the bytes."""


class _SocketReceiver:
    def __init__(self, connection: socket.socket, pins_memory: bool) -> None:
        self._connection = connection
        self._pins_memory = pins_memory

    def receive(self) -> Tensor:
        with _contact():
            beginning = read_exactly(self._connection, LENGTH_BYTES)
            buffer = _buffer(int.from_bytes(beginning, "little"), self._pins_memory)
            view = _bytes_of(buffer)
            view[:LENGTH_BYTES] = beginning
            position = LENGTH_BYTES
            # MSG_WAITALL may still return early, for example after a signal.
            while position < len(view):
                with telling_timeouts():
                    num_bytes = self._connection.recv_into(view[position:], 0, socket.MSG_WAITALL)
                if num_bytes == 0:
                    raise left_error()
                position += num_bytes
        return buffer

    def expect_more(self) -> None:
        """Do nothing: the operating system receives into its socket buffer."""


class _GroupSender:
    def __init__(self, group: ProcessGroup, others: list[list[int]]) -> None:
        self._group = group
        self._others = others
        self._capacities = dict.fromkeys(itertools.chain(*self._others), _FIRST_CAPACITY)
        # Keep the buffers alive until gloo has sent them.
        self._under_way: deque[list[tuple[Work, Tensor]]] = deque()

    def send(self, messages: Sequence[Pieces | None]) -> None:
        # At most three messages in flight, so that a fast reader does not fill the memory.
        while len(self._under_way) > 2:
            self._wait_for_oldest()
        works: list[tuple[Work, Tensor]] = []
        for message, ranks in zip(messages, self._others, strict=True):
            if message is not None:
                buffer = packed(message)
                works.extend((work, buffer) for rank in ranks for work in self._send_to(rank, buffer))
        self._under_way.append(works)

    def flush(self) -> None:
        while self._under_way:
            self._wait_for_oldest()

    def _send_to(self, rank: int, buffer: Tensor) -> Iterator[Work]:
        """Send a buffer to a rank; split it in two if it is longer than all messages before."""
        # A gloo receive needs a buffer before the length is known. Both sides track the longest message so far: the
        # first part fits into that capacity and contains the full length, and the second part follows.
        capacity = self._capacities[rank]
        parts = [buffer] if len(buffer) <= capacity else [buffer[:capacity], buffer[capacity:]]
        self._capacities[rank] = max(capacity, len(buffer))
        for part in parts:
            with _contact():
                work = dist.isend(part, dst=rank, group=self._group)
            assert work is not None, "both ranks are members of the group"
            yield work

    def _wait_for_oldest(self) -> None:
        for work, _ in self._under_way.popleft():
            with _contact():
                work.wait()


class _GroupReceiver:
    def __init__(self, group: ProcessGroup, source: int, pins_memory: bool) -> None:
        self._group = group
        self._source = source
        self._pins_memory = pins_memory
        self._capacity = _FIRST_CAPACITY
        self._posted: tuple[Work, Tensor] | None = None

    def receive(self) -> Tensor:
        work, buffer = self._posted or self._post(_buffer(self._capacity, self._pins_memory))
        self._posted = None
        with _contact():
            work.wait()
        length = length_of(buffer)
        if length > len(buffer):
            buffer = self._receive_whole(buffer, length)
        self._capacity = max(self._capacity, length)
        return buffer

    def expect_more(self) -> None:
        # A receive that is posted early lets gloo transfer the message in the background.
        self._posted = self._post(_buffer(self._capacity, self._pins_memory))

    def _receive_whole(self, beginning: Tensor, length: int) -> Tensor:
        whole = _buffer(length, self._pins_memory)
        whole[: len(beginning)].copy_(beginning)
        work, _ = self._post(whole[len(beginning) :])
        with _contact():
            work.wait()
        return whole

    def _post(self, buffer: Tensor) -> tuple[Work, Tensor]:
        with _contact():
            work = dist.irecv(buffer, src=self._source, group=self._group)
        assert work is not None, "both ranks are members of the group"
        return work, buffer


def _buffer(length: int, pins_memory: bool) -> Tensor:
    return torch.empty(length, dtype=torch.uint8, device="cpu", pin_memory=pins_memory)


def _send_pieces(connection: socket.socket, pieces: Pieces) -> None:
    """Send all pieces, with one system call if possible."""
    # The kernel limits the number of pieces per sendmsg (IOV_MAX) and may send only some of the bytes.
    num_sent = connection.sendmsg(pieces[:_MOST_PIECES])
    for piece in pieces:
        if num_sent < len(piece):
            connection.sendall(memoryview(piece)[num_sent:])
        num_sent = max(num_sent - len(piece), 0)


def _bytes_of(buffer: Tensor) -> memoryview:
    return memoryview(buffer.numpy())  # type: ignore[arg-type]


@contextlib.contextmanager
def _contact() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as lost:
        raise DistributedError(_DURING, None, type(lost).__name__, str(lost)) from lost
