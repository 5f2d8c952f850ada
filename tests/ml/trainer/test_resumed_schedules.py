"""A schedule that is resumed gives the rates of one that was not interrupted, also after the rate was changed."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules
from transformers import get_scheduler

from forgather.ml.checkpoint.optimizer_state import OptimizerState
from forgather.ml.trainer.progress import SchedulerState, kept_rates

NUM_STEPS, INTERRUPTED = 10, 4


def in_turn(later: Callable[[Any], Any], optimizer: Any) -> Any:
    parts = [schedules.LinearLR(optimizer, 0.1, total_iters=3), later(optimizer)]
    return schedules.SequentialLR(optimizer, parts, milestones=[3])


def together(optimizer: Any) -> Any:
    return schedules.ChainedScheduler([schedules.LinearLR(optimizer, 0.1), schedules.ExponentialLR(optimizer, 0.9)])


def by_name(name: str, optimizer: Any) -> Any:
    return get_scheduler(name, optimizer, num_warmup_steps=2, num_training_steps=NUM_STEPS)


cyclic = functools.partial(
    schedules.CyclicLR, base_lr=0.001, max_lr=0.2, step_size_up=3, mode="triangular2", cycle_momentum=False
)
one_cycle = functools.partial(schedules.OneCycleLR, max_lr=0.3, total_steps=NUM_STEPS + 5)
FOLLOWING: dict[str, Callable[[Any], Any]] = {
    "steps": functools.partial(schedules.StepLR, step_size=2, gamma=0.5),
    "exponential": functools.partial(schedules.ExponentialLR, gamma=0.9),
    "cosine": functools.partial(schedules.CosineAnnealingLR, T_max=NUM_STEPS),
    "warm-up": functools.partial(schedules.LinearLR, start_factor=0.1, total_iters=6),
    "in turn": functools.partial(in_turn, functools.partial(schedules.ExponentialLR, gamma=0.9)),
    "together": together,
    "linear of transformers": functools.partial(by_name, "linear"),
    "cosine of transformers": functools.partial(by_name, "cosine"),
}
"""Those whose rates are multiples of that of the optimizer."""
OTHERS: dict[str, Callable[[Any], Any]] = {
    "cycles": cyclic,
    "one cycle": one_cycle,
    "cycles in turn": functools.partial(in_turn, cyclic),
    "one cycle in turn": functools.partial(in_turn, one_cycle),
    "to a least rate": functools.partial(schedules.CosineAnnealingLR, T_max=NUM_STEPS, eta_min=0.01),
}


class Run:
    """An optimizer with a schedule, and what a checkpoint has of them."""

    def __init__(self, schedule: Callable[[Any], Any], rate: Any) -> None:
        named = list(nn.Linear(2, 2).named_parameters())
        groups = [{"params": [one]} for one in named]
        self.optimizer = torch.optim.AdamW([*groups[:1], {**groups[1], "lr": 2 * rate}], lr=rate)
        self.optimizer_state = OptimizerState(self.optimizer, named)
        self.scheduler = schedule(self.optimizer)
        self.scheduler_state = SchedulerState(self.scheduler, self.optimizer)

    def rates(self, num_steps: int) -> list[list[float]]:
        """Those of some steps."""
        noted = []
        for _ in range(num_steps):
            noted.append([float(group["lr"]) for group in self.optimizer.param_groups])
            self.optimizer.step()
            self.scheduler.step()
        return noted

    def resume(self, other: "Run") -> None:
        self.optimizer_state.load_state_dict(other.optimizer_state.state_dict())
        self.scheduler_state.load_state_dict(other.scheduler_state.state_dict())


@pytest.mark.parametrize("kind", [float, torch.tensor], ids=["number", "tensor"])
@pytest.mark.parametrize("name", [*FOLLOWING, *OTHERS])
def test_rates_go_on_bit_for_bit(name: str, kind: Any) -> None:
    schedule = {**FOLLOWING, **OTHERS}[name]
    straight = Run(schedule, kind(0.1)).rates(NUM_STEPS)
    first, second = Run(schedule, kind(0.1)), Run(schedule, kind(0.1))
    first.rates(INTERRUPTED)
    own = [group["lr"] for group in second.optimizer.param_groups]
    second.resume(first)
    assert second.rates(NUM_STEPS - INTERRUPTED) == straight[INTERRUPTED:]
    # Compiled optimizers hold on to a tensor.
    if kind is torch.tensor:
        assert all(group["lr"] is one for group, one in zip(second.optimizer.param_groups, own, strict=True))


@pytest.mark.parametrize("name", FOLLOWING)
def test_a_changed_rate_takes_effect_once(name: str) -> None:
    expected = Run(FOLLOWING[name], 0.25).rates(NUM_STEPS)[INTERRUPTED:]
    first, second = Run(FOLLOWING[name], 0.1), Run(FOLLOWING[name], 0.25)
    first.rates(INTERRUPTED)
    second.resume(first)
    found = second.rates(NUM_STEPS - INTERRUPTED)
    assert [one == pytest.approx(two, rel=1e-9) for one, two in zip(found, expected, strict=True)].count(False) == 0


@pytest.mark.parametrize("name", ["cycles", "one cycle"])
def test_schedules_with_rates_of_their_own_go_on_whatever_that_of_the_optimizer_is(name: str) -> None:
    expected = Run(OTHERS[name], 0.1).rates(NUM_STEPS)[INTERRUPTED:]
    first, second = Run(OTHERS[name], 0.1), Run(OTHERS[name], 0.25)
    first.rates(INTERRUPTED)
    second.resume(first)
    assert second.rates(NUM_STEPS - INTERRUPTED) == expected


def test_a_rate_that_something_else_has_set_stays() -> None:
    first, second = (Run(FOLLOWING["exponential"], 0.1) for _ in range(2))
    first.rates(INTERRUPTED)
    first.optimizer.param_groups[0]["lr"] = 0.7
    second.resume(first)
    assert second.rates(1)[0][0] == 0.7


def test_a_new_schedule_can_leave_the_rates_alone() -> None:
    run = Run(FOLLOWING["steps"], torch.tensor(0.1))
    run.rates(INTERRUPTED)
    before = [float(group["lr"]) for group in run.optimizer.param_groups]
    with kept_rates(run.optimizer):
        FOLLOWING["warm-up"](run.optimizer)
        assert [float(group["lr"]) for group in run.optimizer.param_groups] != before
    assert [float(group["lr"]) for group in run.optimizer.param_groups] == before
