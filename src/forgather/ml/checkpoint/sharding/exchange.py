"""ShardExchange: streams the slices of sharded tensors from all ranks to the ranks that write the full tensors.

Every rank of a shard group has a stream: the sharded tensors that it writes, in the order of its files. In each round
the ranks exchange one window of all streams, point to point over gloo, in host memory. No rank holds more than a few
windows. Invariant: all ranks of the group take part in the same number of rounds, even after a failure to write.
Snapshots create the exchange; weight files and state files read from it.
"""

import bisect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from forgather.ml.checkpoint.sharding.sharded_tensors import Shards, local_part
from forgather.ml.distributed import DistributedError
from forgather.ml.distributed.groups import get_global_process_group

WINDOW_BYTES = 4 * 2**20
"""Bytes of each stream that one round carries. A rank holds about six windows: two rounds, and their messages."""


class StreamItem(NamedTuple):
    """Sharded tensor in a rank's stream: its key, which is the same on all ranks, and its size."""

    key: str
    num_bytes: int


class _Region(NamedTuple):
    """Bytes of one tensor in a window: `start` in the full tensor, `place` in the window."""

    key: str
    start: int
    place: int
    length: int


class _Source(NamedTuple):
    """Slice of this rank as bytes, and the boundaries of all slices in bytes."""

    content: Tensor
    bounds: Sequence[int]


class _Stream:
    """Concatenation of the tensors that one rank writes."""

    def __init__(self, items: Sequence[StreamItem]) -> None:
        self._items = items
        self._ends = list(accumulate(item.num_bytes for item in items))

    @property
    def num_bytes(self) -> int:
        return self._ends[-1] if self._ends else 0

    def ends(self) -> list[tuple[StreamItem, int]]:
        """Return the tensors with the position of their ends."""
        return list(zip(self._items, self._ends, strict=True))

    def regions(self, start: int, end: int) -> list[_Region]:
        """Return the parts of tensors in bytes `start` to `end` of the stream."""
        regions: list[_Region] = []
        index = bisect.bisect_right(self._ends, start)
        while index < len(self._items) and start < end:
            begin = self._ends[index] - self._items[index].num_bytes
            length = min(end, self._ends[index]) - start
            if length > 0:
                place = regions[-1].place + regions[-1].length if regions else 0
                regions.append(_Region(self._items[index].key, start - begin, place, length))
            start += length
            index += 1
        return regions


class _Round(NamedTuple):
    """Window under way: its memory, the pending messages, and received messages that still have to be spread."""

    window: Tensor
    works: list[Any]
    scattered: list[tuple[Tensor, list[_Region]]]
    kept: list[Tensor]
    """Messages that are being sent; they must not be freed before."""


class ShardExchange:
    """Exchange between the ranks of one shard group during one save. Use as a context manager around the writing."""

    def __init__(
        self,
        tensors: Mapping[str, Any],
        shards: Mapping[str, Shards],
        streams: Mapping[int, Sequence[StreamItem]],
        ranks: Sequence[int],
        group: ProcessGroup | None = None,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        """`tensors` are the sharded tensors of this rank by key; `streams` are the items of each rank of the group.

        `ranks` is the shard group. `group` is a gloo group of all ranks of the job, by default the global one.
        """
        self._sources = {key: _source(tensor, shards[key]) for key, tensor in tensors.items()}
        self._ranks = list(ranks)
        self._own = self._ranks.index(dist.get_rank())
        self._streams = [_Stream(streams[rank]) for rank in self._ranks]
        self._group = get_global_process_group() if group is None else group
        self._window_bytes = window_bytes
        longest = max(stream.num_bytes for stream in self._streams)
        self.num_rounds = -(-longest // window_bytes)
        self._started = 0
        self._next: _Round | None = None
        self._window = torch.empty(0, dtype=torch.uint8)
        self._position = 0
        self._lost = False
        self._note_round: Callable[[int], None] = lambda _: None

    def sources_by_round(self) -> list[tuple[str, Tensor]]:
        """Return the slices of this rank by key, in the order of the rounds that send their last bytes."""
        last = self._last_rounds()
        keys = sorted((key for key in self._sources if key in last), key=lambda key: last[key])
        return [(key, self._sources[key].content) for key in keys]

    def rounds_with(self, keys: Collection[object]) -> int:
        """Return the number of rounds until all slices under these keys are sent."""
        return max((number + 1 for key, number in self._last_rounds().items() if key in keys), default=0)

    def stage(self, copies: Mapping[str, Tensor], note_round: Callable[[int], None]) -> None:
        """Send these copies instead of the live slices; `note_round` gets the number of completed rounds."""
        for key, content in copies.items():
            self._sources[key] = self._sources[key]._replace(content=content)
        self._note_round = note_round

    def use_group(self, group: ProcessGroup | None) -> None:
        """Exchange over another gloo group of all ranks, before the first round."""
        self._group = group

    def _last_rounds(self) -> dict[str, int]:
        return {
            item.key: max(0, end - 1) // self._window_bytes for stream in self._streams for item, end in stream.ends()
        }

    def __enter__(self) -> "ShardExchange":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        # After a failed write the other ranks still wait for slices of this rank. After an interrupt it leaves the job.
        if not self._lost and (error is None or isinstance(error, Exception)):
            while self._started < self.num_rounds or self._next is not None:
                self._advance()
        self._sources.clear()

    def chunks(self, tensor: Any) -> Iterator[memoryview]:
        """Yield the content of a full tensor. Call it for the tensors of this rank's stream, in order."""
        left = tensor.numel() * tensor.element_size()
        while left > 0:
            if self._position == len(self._window):
                self._advance()
            chunk = self._window[self._position : self._position + left]
            self._position += len(chunk)
            left -= len(chunk)
            yield memoryview(chunk.numpy())  # type: ignore[arg-type]
            # Or the window would stay in memory while the next one is received.
            del chunk

    def _advance(self) -> None:
        """Finish the next round, and start the one after it, so that messages travel while this window is written."""
        if self._next is None and self._started < self.num_rounds:
            self._next = self._start()
        assert self._next is not None, "more was read than the stream of this rank holds"
        under_way = self._next
        self._finish(under_way)
        # At most one round is under way, and the next one has not started.
        self._note_round(self._started)
        # Free the last window and the messages of this one before the next round allocates its own.
        self._window, self._position, self._next = under_way.window, 0, None
        del under_way
        if self._started < self.num_rounds:
            self._next = self._start()

    def _start(self) -> _Round:
        begin = self._started * self._window_bytes
        self._started += 1
        regions = [stream.regions(begin, begin + self._window_bytes) for stream in self._streams]
        window = torch.empty(sum(one.length for one in regions[self._own]), dtype=torch.uint8)
        under_way = _Round(window, [], [], [])
        try:
            for position, rank in enumerate(self._ranks):
                if position == self._own:
                    self._keep_own(window, regions[position])
                else:
                    self._receive(under_way, rank, self._overlaps(regions[self._own], position))
                    self._send(under_way, rank, self._overlaps(regions[position], self._own))
        except RuntimeError as error:
            raise self._failure(error) from error
        return under_way

    def _keep_own(self, window: Tensor, regions: Sequence[_Region]) -> None:
        for region in self._overlaps(regions, self._own):
            window[region.place : region.place + region.length].copy_(self._content(region))

    def _receive(self, under_way: _Round, rank: int, regions: list[_Region]) -> None:
        if not regions:
            return
        if len(regions) == 1:
            message = under_way.window[regions[0].place : regions[0].place + regions[0].length]
        else:
            message = torch.empty(sum(one.length for one in regions), dtype=torch.uint8)
            under_way.scattered.append((message, regions))
        under_way.works.append(dist.irecv(message, src=rank, group=self._group))

    def _send(self, under_way: _Round, rank: int, regions: list[_Region]) -> None:
        if not regions:
            return
        contents = [self._content(region) for region in regions]
        message = contents[0] if len(contents) == 1 else torch.cat(contents)
        # Device memory is copied to the host here: gloo sends host memory.
        message = message.cpu()
        under_way.kept.append(message)
        under_way.works.append(dist.isend(message, dst=rank, group=self._group))

    def _finish(self, under_way: _Round) -> None:
        try:
            for work in under_way.works:
                work.wait()
        except RuntimeError as error:
            raise self._failure(error) from error
        for message, regions in under_way.scattered:
            position = 0
            for region in regions:
                window = under_way.window[region.place : region.place + region.length]
                window.copy_(message[position : position + region.length])
                position += region.length

    def _overlaps(self, regions: Sequence[_Region], position: int) -> list[_Region]:
        """Return the parts of the regions that the rank at `position` holds."""
        found = []
        for region in regions:
            bounds = self._sources[region.key].bounds
            start, end = max(region.start, bounds[position]), min(region.start + region.length, bounds[position + 1])
            if start < end:
                place = region.place + start - region.start
                found.append(_Region(region.key, start, place, end - start))
        return found

    def _content(self, region: _Region) -> Tensor:
        content, bounds = self._sources[region.key]
        start = region.start - bounds[self._own]
        return content[start : start + region.length]

    def _failure(self, error: RuntimeError) -> DistributedError:
        self._lost = True
        return DistributedError("exchanging slices of sharded tensors", None, type(error).__name__, str(error))


def _source(tensor: Any, shards: Shards) -> _Source:
    content = local_part(tensor).contiguous().view(-1).view(torch.uint8)
    itemsize = tensor.element_size()
    return _Source(content, [bound * itemsize for bound in shards.bounds])
