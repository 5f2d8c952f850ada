"""Gathering of predictions: the batches of all ranks become arrays in the order of the dataset, on every rank.

In each round of an evaluation, the data-parallel ranks get consecutive batches of the dataset, so the order is by round
and then by data-parallel rank. Shorter batches are padded with -100. Memory is the result, the batches of this rank and
one message. The collector calls `gathered` on all ranks.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from forgather.ml.distributed.watch import EVALUATION, note
from forgather.ml.trainer.metrics.nested import Layout
from forgather.ml.trainer.ranks.team import Team

PADDING = -100
_MESSAGE_BYTES = 2**24
_ALIGNMENT = 16
_TOO_NARROW = (torch.bool, torch.uint8)
"""Types without the value -100."""


class Meta(NamedTuple):
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "Meta":
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Contribution:
    """Batches of one rank: its number among data-parallel ranks, and the shapes of all leaves of each batch."""

    part: int
    layout: Layout
    batches: list[list[Meta]]


class _Piece(NamedTuple):
    """One leaf of a batch, and the first row of its place in the result."""

    batch: int
    leaf: int
    row: int
    meta: Meta


def gathered(team: Team, part: int, layout: Layout, batches: list[list[Tensor]]) -> tuple[Layout, list[Tensor]]:
    """Return the layout and the leaves of all samples; collective.

    Ranks that have collected nothing, such as the first stages of a pipeline, pass no batches.
    """
    batches = [[_with_rows(leaf) for leaf in leaves] for leaves in batches]
    own = Contribution(part, layout, [[Meta.of(leaf) for leaf in leaves] for leaves in batches])
    told = team.gather(own)
    senders = sorted((rank for rank, one in enumerate(told) if one.batches), key=lambda rank: told[rank].part)
    if not senders:
        return None, []
    common = told[senders[0]].layout
    require_one_layout([told[rank].layout for rank in senders])
    plans = _plans([told[rank].batches for rank in senders])
    results = [_result(metas) for metas in _by_leaf([told[rank].batches for rank in senders])]
    for rank, pieces in zip(senders, plans, strict=True):
        for message in _messages(pieces):
            _send(team, rank, message, batches if rank == team.rank else None, results)
    return common, results


def joined(leaves: Sequence[Tensor]) -> Tensor:
    """Return the rows of all tensors, padded with -100 to the largest shape."""
    rows = [_with_rows(leaf) for leaf in leaves]
    result = _result([Meta.of(leaf) for leaf in rows])
    start = 0
    for leaf in rows:
        _place(result, start, leaf)
        start += len(leaf)
    return result


def _with_rows(leaf: Tensor) -> Tensor:
    # A scalar, such as a second loss of the model, has one row per batch.
    return leaf.reshape(1) if leaf.ndim == 0 else leaf


def require_one_layout(layouts: Sequence[Layout]) -> None:
    """Raise ValueError if the values of ranks have different structures."""
    other = next((one for one in layouts if one != layouts[0]), None)
    if other is not None:
        raise ValueError(
            f"Ranks have predictions of different structures, {layouts[0]} and {other} (numbers stand for tensors), which "
            "cannot be joined. Make the model and preprocess_logits_for_metrics return the same structure for each batch."
        )


def _by_leaf(batches_of_ranks: Sequence[list[list[Meta]]]) -> list[list[Meta]]:
    num_leaves = len(batches_of_ranks[0][0])
    return [[metas[leaf] for batches in batches_of_ranks for metas in batches] for leaf in range(num_leaves)]


def _plans(batches_of_ranks: Sequence[list[list[Meta]]]) -> list[list[_Piece]]:
    """Return the pieces of each rank, with their places in the order of the dataset."""
    plans: list[list[_Piece]] = [[] for _ in batches_of_ranks]
    num_leaves = len(batches_of_ranks[0][0])
    rows = [0] * num_leaves
    for number in range(max(map(len, batches_of_ranks))):
        for batches, plan in zip(batches_of_ranks, plans, strict=True):
            if number >= len(batches):
                continue
            for leaf, meta in enumerate(batches[number]):
                plan.append(_Piece(number, leaf, rows[leaf], meta))
                rows[leaf] += meta.shape[0]
    return plans


def _result(metas: Sequence[Meta]) -> Tensor:
    """Return a tensor for the rows of all batches; padding is -100."""
    dimensions = {len(meta.shape) for meta in metas}
    if len(dimensions) > 1:
        raise ValueError(
            f"Batches have predictions or labels of {sorted(dimensions)} dimensions, which cannot be joined. Return tensors "
            "with the same number of dimensions for each batch, such as in preprocess_logits_for_metrics."
        )
    num_rows = sum(meta.shape[0] for meta in metas)
    inner = [max(sizes) for sizes in zip(*(meta.shape[1:] for meta in metas), strict=True)]
    dtype = metas[0].dtype
    for meta in metas:
        dtype = torch.promote_types(dtype, meta.dtype)
    if all(list(meta.shape[1:]) == inner for meta in metas):
        return torch.empty(num_rows, *inner, dtype=dtype)
    return torch.full((num_rows, *inner), PADDING, dtype=torch.int64 if dtype in _TOO_NARROW else dtype)


def _messages(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """Group pieces into messages of limited size. A larger piece is a separate message."""
    message: list[_Piece] = []
    size = 0
    for piece in pieces:
        if message and size + piece.meta.num_bytes > _MESSAGE_BYTES:
            yield message
            message, size = [], 0
        message.append(piece)
        size += piece.meta.num_bytes
    if message:
        yield message


def _send(
    team: Team, source: int, message: Sequence[_Piece], own: list[list[Tensor]] | None, results: Sequence[Tensor]
) -> None:
    """Place one message of the rank `source` into the results of all ranks; `own` are its batches, on that rank."""
    note(EVALUATION)
    if own is None or team.size > 1:
        _broadcast(team, source, message, own, results)
    for piece in message if own is not None else ():
        assert own is not None
        _place(results[piece.leaf], piece.row, own[piece.batch][piece.leaf])
        # Free each tensor as soon as its rows are in the result.
        own[piece.batch][piece.leaf] = torch.empty(0)


def _broadcast(
    team: Team, source: int, message: Sequence[_Piece], own: list[list[Tensor]] | None, results: Sequence[Tensor]
) -> None:
    starts, end = [], 0
    for piece in message:
        starts.append(end)
        end += math.ceil(piece.meta.num_bytes / _ALIGNMENT) * _ALIGNMENT
    buffer = torch.empty(end, dtype=torch.uint8)
    slots = [
        buffer[start : start + piece.meta.num_bytes].view(piece.meta.dtype).view(piece.meta.shape)
        for start, piece in zip(starts, message, strict=True)
    ]
    if own is not None:
        for slot, piece in zip(slots, message, strict=True):
            slot.copy_(own[piece.batch][piece.leaf])
    team.share_buffer(source, buffer)
    if own is None:
        for slot, piece in zip(slots, message, strict=True):
            _place(results[piece.leaf], piece.row, slot)


def _place(result: Tensor, row: int, leaf: Tensor) -> None:
    inner = tuple(slice(size) for size in leaf.shape[1:])
    result[(slice(row, row + len(leaf)), *inner)] = leaf
