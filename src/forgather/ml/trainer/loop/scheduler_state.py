"""Learning-rate schedule as a checkpoint component.

A resume takes the position of the schedule from the checkpoint, and the base learning rates from the current settings.
A changed `learning_rate` thus takes effect on resume, while an unchanged one continues bit-exactly.
`Optimization` holds one `SchedulerState` per schedule.
"""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import CyclicLR, LambdaLR

from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.checkpoint.state.state_schema import Violation, refusal
from forgather.ml.trainer.loop.scheduler_schema import (
    UnknownKeyViolation,
    group_lists,
    like_scheduler,
    mismatch,
    unwrapped,
)
from forgather.ml.trainer.trainer_types import LRSchedulerT, OptimizerT


class SchedulerState:
    """State of a schedule: the position comes from the checkpoint, the learning rate from the current settings."""

    def __init__(self, scheduler: LRSchedulerT, optimizer: OptimizerT) -> None:
        self._scheduler = scheduler
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._scheduler.state_dict()
        return state

    def check_state_dict(self, state: Any) -> None:
        """Raise `CheckpointLoadError` for a state that does not fit this kind of scheduler."""
        scheduler = unwrapped(self._scheduler)
        try:
            group_lists(scheduler, state)
            like_scheduler(scheduler, self._fitting(state), fits_any_groups(scheduler))
        except UnknownKeyViolation as violation:
            raise mismatch(violation, "scheduler", type(scheduler).__name__) from None
        except Violation as violation:
            raise refusal(violation, "scheduler") from None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the position of the schedule and apply the current learning rates."""
        # The optimizer must be loaded before: its groups keep a learning rate that the user changed since the checkpoint.
        self.check_state_dict(state)
        scheduler, groups = self._scheduler, self._optimizer.param_groups
        asked = [group.get("initial_lr", group["lr"]) for group in groups]
        parts = [part for part in _parts(scheduler) if hasattr(part, "base_lrs")]
        wanted, first = [list(part.base_lrs) for part in parts], _last_rates(scheduler)
        scheduler.load_state_dict(self._fitting(state))
        saved, last = [list(part.base_lrs) for part in parts], _last_rates(scheduler)
        if isinstance(scheduler, LambdaLR):
            # Recompute the rates in closed form: changed settings apply at once, unchanged settings give equal rates.
            scheduler.base_lrs = asked
            self._set_rates(
                [rate * one(scheduler.last_epoch) for rate, one in zip(asked, scheduler.lr_lambdas, strict=True)]
            )
        elif wanted != saved and not _agree(parts, saved, asked):
            # Recursive schedules derive each rate from the last, so a changed base rate scales the last rates too.
            for part, new, old in zip(parts, wanted, saved, strict=True):
                part.base_lrs, part._last_lr = new, _scaled(_last_rates(part), new, old)
            self._set_rates(_scaled(last, wanted[0], saved[0]))
        else:
            for group, rate, begun in zip(groups, last, first, strict=False):
                # Groups with parameters already have the rate from the optimizer state. The exceptions are groups
                # without parameters, and groups that still have the initial rate set by the new schedule.
                if not group["params"] or (parts and group["lr"] == begun):
                    _set_rate(group, rate)

    def _set_rates(self, rates: list[Any]) -> None:
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            _set_rate(group, rate)
        self._scheduler._last_lr = rates

    def _fitting(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state for the current number of parameter groups; raise CheckpointLoadError if that is impossible."""
        # Only closed-form schedules can be converted: their rates do not depend on the saved rates of each group.
        rates = state.get("base_lrs", state.get("_last_lr"))
        number = len(self._optimizer.param_groups)
        if not isinstance(rates, (list, tuple)) or len(rates) == number:
            return state
        if not fits_any_groups(self._scheduler) or any(state.get("lr_lambdas", ())):
            raise CheckpointLoadError.misfit(
                f"The {type(self._scheduler).__name__} schedule in the checkpoint has {len(rates)} parameter groups, "
                f"but the optimizer has {number} now. Use the same groups as before (optimizer_groups), or start a new "
                'schedule with skip_checkpoint_components=["scheduler"].'
            )
        return {**state, "lr_lambdas": [None] * number}


def fits_any_groups(scheduler: LRSchedulerT) -> bool:
    """Return whether the state of a schedule fits any number of groups: a LambdaLR with stateless functions."""
    # Torch saves the attributes of callable objects in `lr_lambdas`; plain functions and `partial` objects have none.
    return isinstance(scheduler, LambdaLR) and not any(scheduler.state_dict()["lr_lambdas"])


@contextlib.contextmanager
def kept_rates(optimizer: OptimizerT) -> Iterator[None]:
    """Restore the learning rates, momenta and betas of an optimizer after the body."""
    names = ("lr", "momentum", "betas")
    kept = [{name: copy.deepcopy(group[name]) for name in names if name in group} for group in optimizer.param_groups]
    try:
        yield
    finally:
        for group, values in zip(optimizer.param_groups, kept, strict=True):
            for name, value in values.items():
                _set_rate(group, value, name)


def _set_rate(group: dict[str, Any], value: object, name: str = "lr") -> None:
    if isinstance(group[name], Tensor):
        # Assign in place: compiled optimizers hold a reference to the tensor.
        group[name].copy_(torch.as_tensor(value))
    else:
        group[name] = value


def _agree(parts: list[Any], saved: list[list[Any]], asked: list[Any]) -> bool:
    """Return whether the saved base rates are the ones that the optimizer has restored from the checkpoint.

    They may then differ from the settings: the checkpoint was modified, and its rates apply. `CyclicLR` takes its rates
    from its own arguments instead.
    """
    return all(rates == asked and not isinstance(part, CyclicLR) for part, rates in zip(parts, saved, strict=True))


def _last_rates(scheduler: object) -> list[Any]:
    return list(getattr(scheduler, "_last_lr", ()))


def _parts(scheduler: object) -> Iterator[Any]:
    """Yield the elementary schedules of a composite schedule, or the schedule itself."""
    nested = getattr(scheduler, "_schedulers", None)
    if nested is None:
        yield scheduler
    for part in nested or ():
        yield from _parts(part)


def _scaled(rates: list[Any], asked: list[Any], saved: list[Any]) -> list[Any]:
    return [rate * new / old if old else rate for rate, new, old in zip(rates, asked, saved, strict=True)]
