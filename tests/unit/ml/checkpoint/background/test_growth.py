"""Growth of the state in the first step: the number that background saves allocate equals the moments of the step."""

from typing import Any

import pytest
import torch
from torch import nn

from forgather.ml.checkpoint.background.arena import aligned
from forgather.ml.checkpoint.background.growth import growth_by
from forgather.ml.optim.multiopt import Multiopt

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "NAdam": (torch.optim.NAdam, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "SGD": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "RMSprop": (torch.optim.RMSprop, {}),
    "centered": (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {}),
}


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    leaves = [leaf for state in optimizer.state.values() for leaf in state.values() if isinstance(leaf, torch.Tensor)]
    return sum(aligned(leaf.nbytes) for leaf in leaves)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_growth_is_the_state_that_the_first_step_adds(name: str) -> None:
    kind, options = OPTIMIZERS[name]
    model = nn.Sequential(nn.Linear(100, 200), nn.Linear(200, 10))
    model[1].bias.requires_grad_(False)
    optimizer = kind(model.parameters(), **options)
    before = state_bytes(optimizer)
    found = growth_by(optimizer)
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    added = state_bytes(optimizer) - before
    # Every parameter may have further counters, in memory of 64 bytes each.
    assert abs(found.num_bytes - added) <= 2 * 64 * len(list(model.parameters()))
    assert growth_by(optimizer).num_bytes == 0 or not added


def test_growth_counts_the_optimizers_behind_wrappers() -> None:
    first, second = nn.Linear(8, 8), nn.Linear(8, 16)
    parts = [torch.optim.AdamW(first.parameters()), torch.optim.AdamW(second.parameters())]
    assert growth_by(Multiopt(parts)) == tuple(map(sum, zip(*map(growth_by, parts), strict=True)))
