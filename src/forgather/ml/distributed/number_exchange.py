"""Asynchronous all-reduce of a few numbers: started early, finished when the sums are needed.

Sums are bit-identical on all ranks. Trainers exchange token and batch counts this way, over Unix sockets on one machine
and over a gloo group otherwise.
"""

import struct
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from forgather.ml.distributed.agreement import control_device
from forgather.ml.distributed.rank_links import RankLinks, read_exactly

_MOST_BYTES = 2**15
"""Largest socket message. Every rank writes before it reads, so a message must fit into the socket buffers."""

Numbers = Sequence[int] | Sequence[float]


class NumberExchange(Protocol):
    """Asynchronous sums over all ranks.

    All ranks start the same sums in the same order. Several sums may be in progress at a time. `start` and `finish`
    raise RuntimeError or OSError if another rank has left.
    """

    def start(self, numbers: Numbers) -> int:
        """Send the numbers of this rank, all of the same type; return a ticket for `finish`."""

    def finish(self, ticket: int) -> list[int] | list[float]:
        """Return the sums over all ranks, bit-identical on each; call it once per ticket."""

    def close(self) -> None:
        """Close the connections; other ranks notice when they next wait for this rank."""


def number_exchange(links: RankLinks) -> NumberExchange:
    """Return the fastest exchange that the links allow: sockets if there are any, else the process group."""
    by_group = GroupExchange(links.group)
    return by_group if links.sockets is None else SocketExchange(links, by_group)


class GroupExchange:
    """Number exchange by asynchronous all-reduces of a process group."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self._group = group
        self._device = control_device(group)
        self._under_way: dict[int, tuple[Work, Tensor]] = {}
        self._num_started = 0

    def start(self, numbers: Numbers) -> int:
        # Token counts may exceed the range of int32 and the precision of float32.
        dtype = torch.float64 if isinstance(numbers[0], float) else torch.int64
        sums = torch.tensor(numbers, dtype=dtype, device=self._device)
        work = dist.all_reduce(sums, group=self._group, async_op=True)
        assert work is not None, "this rank is a member of the group"
        self._num_started += 1
        self._under_way[self._num_started] = work, sums
        return self._num_started

    def finish(self, ticket: int) -> list[int] | list[float]:
        work, sums = self._under_way.pop(ticket)
        work.wait()
        return sums.tolist()

    def close(self) -> None:
        self._under_way.clear()


class SocketExchange:
    """Number exchange by one socket message to each other rank; long messages use the process group."""

    def __init__(self, links: RankLinks, by_group: GroupExchange) -> None:
        assert links.sockets is not None
        self._links = links
        self._sockets = list(links.sockets.values())
        # Position of this rank's numbers in rank order. Every rank adds in that order, so that floating-point sums are
        # bit-identical.
        self._place = dist.get_rank(links.group)
        self._by_group = by_group
        self._own: deque[Numbers | int] = deque()
        """Sums in progress: the numbers of this rank, or a ticket of the group exchange."""
        self._sums: dict[int, list[int] | list[float]] = {}
        self._num_started = 0
        self._num_finished = 0

    def start(self, numbers: Numbers) -> int:
        if 8 * len(numbers) > _MOST_BYTES:
            self._own.append(self._by_group.start(numbers))
        else:
            message = struct.pack(_layout(numbers), *numbers)
            for connection in self._sockets:
                connection.sendall(message)
            self._own.append(numbers)
        self._num_started += 1
        return self._num_started

    def finish(self, ticket: int) -> list[int] | list[float]:
        # Messages carry no ticket and arrive in the order of `start` calls, so earlier sums must be read first.
        while self._num_finished < ticket:
            self._num_finished += 1
            own = self._own.popleft()
            sums = self._by_group.finish(own) if isinstance(own, int) else self._received(own)
            self._sums[self._num_finished] = sums
        return self._sums.pop(ticket)

    def close(self) -> None:
        self._links.close()

    def _received(self, own: Numbers) -> list[int] | list[float]:
        layout, num_bytes = _layout(own), 8 * len(own)
        rows: list[Numbers] = [struct.unpack(layout, read_exactly(one, num_bytes)) for one in self._sockets]
        rows.insert(self._place, own)
        return [sum(column) for column in zip(*rows, strict=True)]


def _layout(numbers: Numbers) -> str:
    return f"{len(numbers)}{'d' if isinstance(numbers[0], float) else 'q'}"
