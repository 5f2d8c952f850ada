"""Learning-rate schedules: rates and state equal transformers, without importing it."""

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler
from transformers.optimization import get_scheduler

from forgather.ml.trainer.setup.schedules import make_schedule

OWN = ("constant", "constant_with_warmup", "linear", "cosine")


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.3)


def rates(schedule: LRScheduler, num_steps: int) -> list[float]:
    found = []
    for _ in range(num_steps):
        found.append(schedule.get_last_lr()[0])
        schedule.optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize(("num_warmup_steps", "num_steps"), [(0, 7), (3, 11), (5, 5), (9, 4), (0, 1), (13, 2**62)])
def test_rates_and_state_equal_transformers(name: str, num_warmup_steps: int, num_steps: int) -> None:
    ours = make_schedule(name, optimizer(), num_warmup_steps, num_steps, None)
    theirs = get_scheduler(name, optimizer(), num_warmup_steps, num_steps)
    assert isinstance(ours, LRScheduler) and type(ours) is type(theirs)
    assert ours.state_dict() == theirs.state_dict()
    assert rates(ours, 17) == rates(theirs, 17)
    assert ours.state_dict() == theirs.state_dict()


def test_options_and_other_schedules_come_from_transformers() -> None:
    ours = make_schedule("cosine", optimizer(), 2, 10, {"num_cycles": 1.5})
    theirs = get_scheduler("cosine", optimizer(), 2, 10, {"num_cycles": 1.5})
    assert isinstance(ours, LRScheduler) and rates(ours, 10) == rates(theirs, 10)
    ours = make_schedule("polynomial", optimizer(), 2, 10, None)
    assert isinstance(ours, LRScheduler)
    assert rates(ours, 10) == rates(get_scheduler("polynomial", optimizer(), 2, 10), 10)
    with pytest.raises(TypeError, match="num_cycles"):
        make_schedule("linear", optimizer(), 2, 10, {"num_cycles": 1.5})
