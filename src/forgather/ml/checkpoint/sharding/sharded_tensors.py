"""Sharded tensors: DTensors with rows (dimension 0) divided over the ranks of one mesh axis, as `fully_shard` makes them.

Checkpoints contain full tensors. This module finds the rows of each rank, and makes shards from full tensors. DTensor is
slow to import, so nothing here imports it before a caller has made one.
"""

import math
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from forgather.ml.checkpoint.errors import CheckpointSaveError


def is_dtensor(value: object) -> bool:
    """Return whether a value is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


class Shards(NamedTuple):
    """Division of a tensor over ranks: element `bounds[i]` of the flat tensor is the first one of `ranks[i]`."""

    ranks: tuple[int, ...]
    bounds: tuple[int, ...]
    position: int
    """Position of this rank in `ranks`."""

    @property
    def start(self) -> int:
        """First element of this rank."""
        return self.bounds[self.position]

    @property
    def length(self) -> int:
        return self.bounds[self.position + 1] - self.start


def is_sharded(value: object) -> bool:
    """Return whether a value is a DTensor that is divided over ranks."""
    return is_dtensor(value) and any(not placement.is_replicate() for placement in value.placements)  # type: ignore[attr-defined]


def shards_of(tensor: Any, what: str = "A tensor") -> Shards:
    """Return how a sharded tensor is divided; raise `CheckpointSaveError` for a division other than by rows."""
    axes = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if len(axes) != 1 or not tensor.placements[axes[0]].is_shard(0):
        raise CheckpointSaveError(
            f"{what} is a DTensor with placements {tuple(tensor.placements)}. Checkpoints support tensors that are sharded "
            "by rows, Shard(0), over one mesh axis and replicated over all others, as fully_shard makes them."
        )
    # Not from the process group of the mesh: DTensor caches results of operations with an equal mesh of an earlier run in
    # this process, and the process group of that mesh may be destroyed.
    coordinate = list(tensor.device_mesh.get_coordinate())
    position = coordinate[axes[0]]
    coordinate[axes[0]] = slice(None)
    ranks = tuple(tensor.device_mesh.mesh[tuple(coordinate)].tolist())
    num_rows, row = tensor.shape[0], math.prod(tensor.shape[1:])
    # As torch.chunk: all ranks but the last have the same number of rows, and the last ones may have none.
    most = -(-num_rows // len(ranks))
    bounds = tuple(min(number * most, num_rows) * row for number in range(len(ranks) + 1))
    return Shards(ranks, bounds, position)


def shard_group(tensor: Any) -> ProcessGroup:
    """Return the process group of the ranks that hold the shards of a sharded tensor."""
    axis = next(axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate())
    group: ProcessGroup = tensor.device_mesh.get_group(axis)
    return group


def local_part(value: Any) -> Any:
    """Return the tensor of this rank in a DTensor; any other value unchanged."""
    if not is_dtensor(value):
        return value
    # Without gradients `to_local` returns the tensor itself, and costs no operation of DTensor.
    with torch.no_grad():
        return value.to_local()


def with_local_parts(state: Any) -> Any:
    """Return a state with the tensors of this rank instead of DTensors."""
    if isinstance(state, Mapping):
        return {key: with_local_parts(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(with_local_parts(value) for value in state)
    return local_part(state)


def rows_of(full: Tensor, like: Any) -> Tensor:
    """Return the rows of a full tensor that this rank holds of the sharded tensor `like`, as a view."""
    shards = shards_of(like)
    row = max(1, math.prod(full.shape[1:]))
    return full.narrow(0, shards.start // row, shards.length // row)


def as_shard(rows: Tensor, like: Any) -> Any:
    """Return a DTensor with the layout of `like`, from the rows of this rank."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
