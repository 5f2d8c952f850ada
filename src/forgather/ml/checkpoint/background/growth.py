"""StateGrowth: bytes that the first optimizer step adds to the state of a rank.

Background saves touch their staging memory from the start of training on, before the moments exist. A wrong number
costs time or memory for a moment only: the memory is planned again after the first step.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forgather.ml.checkpoint.background.arena import aligned
from forgather.ml.checkpoint.sharding.sharded_tensors import local_part

_TWO_MOMENTS = (torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.Adadelta)


class StateGrowth(NamedTuple):
    """Bytes of the trained weights that have no optimizer state yet, and of the moments that they will have."""

    num_bytes_of_weights: int
    num_bytes: int


def growth_by(optimizer: Any) -> StateGrowth:
    """Return the growth of the state in the first step of an optimizer, 0 for optimizers of unknown classes."""
    weights = moments = 0
    for one in _inner(optimizer):
        for group in one.param_groups:
            sizes = [local_part(each).nbytes for each in group["params"] if _is_new(each, one)]
            weights += sum(sizes)
            # Optimizers with moments also count the steps of each parameter, in a tensor.
            moments += sum(_num_moments(one, group) * aligned(size) + aligned(1) for size in sizes)
    return StateGrowth(weights, moments)


def _inner(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """Yield the optimizers behind wrappers, such as the one of Accelerate, and in `Multiopt`."""
    parts = getattr(optimizer, "optimizers", None) or [getattr(optimizer, "optimizer", None)]
    for part in parts:
        if part is None:
            yield optimizer
        else:
            yield from _inner(part)


def _is_new(parameter: Tensor, optimizer: torch.optim.Optimizer) -> bool:
    return parameter.requires_grad and not optimizer.state.get(parameter)


def _num_moments(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> int:
    if isinstance(optimizer, _TWO_MOMENTS):
        return 2 + bool(group.get("amsgrad"))
    if isinstance(optimizer, torch.optim.SGD):
        return int(bool(group["momentum"]))
    if isinstance(optimizer, torch.optim.RMSprop):
        return 1 + bool(group["centered"]) + bool(group["momentum"])
    return 0
