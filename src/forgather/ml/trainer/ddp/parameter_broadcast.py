"""Broadcast of updated parameters from their owners to all ranks, in flat buckets (ZeRO-1).

In total a rank receives as many bytes as in an all-gather. `ShardedOptimizer` calls it after each step.
"""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed import ProcessGroup

_BUCKET_BYTES = 25 * 2**20
"""Size of a bucket, as the default of DDP's all-reduce buckets."""
_LARGE_BYTES = 2**20
"""Minimum size of a parameter that is broadcast in place: two copies through a bucket cost more than a message."""
_MAX_PENDING = 4
"""Number of buckets in flight. Each takes memory for one flat copy."""


class _Bucket(NamedTuple):
    owner: int
    parameters: list[Tensor]
    is_flat: bool
    """Whether the parameters are copied to one flat tensor; otherwise one parameter is broadcast in place."""


class _Pending(NamedTuple):
    bucket: _Bucket
    values: Tensor
    work: dist.Work


class ParameterBroadcast:
    """Broadcast of parameters from the rank that owns them.

    `by_owner[r]` lists the parameters of rank r. The lists and sizes must be equal on all ranks, in the same order.
    """

    def __init__(
        self,
        by_owner: Sequence[Sequence[Tensor]],
        group: ProcessGroup,
        bucket_bytes: int = _BUCKET_BYTES,
        large_bytes: int = _LARGE_BYTES,
    ) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        per_owner = [
            list(_buckets(owner, parameters, bucket_bytes, large_bytes)) for owner, parameters in enumerate(by_owner)
        ]
        # Owners take turns, so that messages in flight use the links of several ranks.
        turns = itertools.chain.from_iterable(itertools.zip_longest(*per_owner))
        self._buckets = [bucket for bucket in turns if bucket is not None]

    @torch.no_grad()
    def run(self) -> None:
        """Give all ranks the owners' values; collective. On an accelerator only the stream waits, not the host."""
        pending: deque[_Pending] = deque()
        for bucket in self._buckets:
            if len(pending) == _MAX_PENDING:
                self._finish(pending.popleft())
            pending.append(self._begin(bucket))
        while pending:
            self._finish(pending.popleft())

    def _begin(self, bucket: _Bucket) -> _Pending:
        first = bucket.parameters[0]
        if not bucket.is_flat:
            # `data` has a separate version counter: for its owner, the parameter stays unchanged (`MasterWeights`).
            values = first.data
        elif bucket.owner == self._rank:
            values = _flatten_dense_tensors([one.detach() for one in bucket.parameters])
        else:
            values = torch.empty(sum(one.numel() for one in bucket.parameters), dtype=first.dtype, device=first.device)
        work = dist.broadcast(values, group=self._group, group_src=bucket.owner, async_op=True)
        assert work is not None
        return _Pending(bucket, values, work)

    def _finish(self, pending: _Pending) -> None:
        pending.work.wait()
        bucket = pending.bucket
        if bucket.is_flat and bucket.owner != self._rank:
            torch._foreach_copy_(bucket.parameters, _unflatten_dense_tensors(pending.values, bucket.parameters))


def _buckets(owner: int, parameters: Sequence[Tensor], size: int, large: int) -> Iterator[_Bucket]:
    """Yield large parameters alone and the others in buckets of one dtype."""
    small: dict[torch.dtype, list[Tensor]] = {}
    for one in parameters:
        if one.nbytes >= large and one.is_contiguous():
            yield _Bucket(owner, [one], is_flat=False)
        else:
            small.setdefault(one.dtype, []).append(one)
    for members in small.values():
        for portion in _portions(members, size):
            yield _Bucket(owner, portion, is_flat=True)


def _portions(parameters: Sequence[Tensor], size: int) -> Iterator[list[Tensor]]:
    portion: list[Tensor] = []
    room = size
    for one in parameters:
        if portion and one.nbytes > room:
            yield portion
            portion, room = [], size
        portion.append(one)
        room -= one.nbytes
    if portion:
        yield portion
