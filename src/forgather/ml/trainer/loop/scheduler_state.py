"""Learning-rate schedule as a component: its state follows the checkpoint, its rates follow the user."""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

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
    """A schedule that follows the checkpoint, but acts on the learning rate that the user has asked for now."""

    def __init__(self, scheduler: LRSchedulerT, optimizer: OptimizerT) -> None:
        self._scheduler = scheduler
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._scheduler.state_dict()
        return state

    def check_state_dict(self, state: Any) -> None:
        """Raise a `CheckpointLoadError` for a state that is not one of this kind of scheduler."""
        scheduler = unwrapped(self._scheduler)
        try:
            group_lists(scheduler, state)
            like_scheduler(scheduler, self._fitting(state), fits_any_groups(scheduler))
        except UnknownKeyViolation as violation:
            raise mismatch(violation, "scheduler", type(scheduler).__name__) from None
        except Violation as violation:
            raise refusal(violation, "scheduler") from None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Comes after the optimizer, whose groups keep a rate that the user changed since the checkpoint."""
        self.check_state_dict(state)
        scheduler, groups = self._scheduler, self._optimizer.param_groups
        asked = [group.get("initial_lr", group["lr"]) for group in groups]
        parts = [part for part in _parts(scheduler) if hasattr(part, "base_lrs")]
        wanted, first = [list(part.base_lrs) for part in parts], _last_rates(scheduler)
        scheduler.load_state_dict(self._fitting(state))
        saved, last = [list(part.base_lrs) for part in parts], _last_rates(scheduler)
        if isinstance(scheduler, LambdaLR):
            # In closed form, so what was changed since takes effect at once; nothing changes when nothing was.
            scheduler.base_lrs = asked
            self._set_rates(
                [rate * one(scheduler.last_epoch) for rate, one in zip(asked, scheduler.lr_lambdas, strict=True)]
            )
        elif wanted != saved:
            for part, new, old in zip(parts, wanted, saved, strict=True):
                part.base_lrs, part._last_lr = new, _scaled(_last_rates(part), new, old)
            self._set_rates(_scaled(last, wanted[0], saved[0]))
        else:
            for group, rate, begun in zip(groups, last, first, strict=False):
                # The rates of the others came with the state of their parameters. One that the schedule has just set,
                # in place of one that the user changed, is that of its beginning.
                if not group["params"] or (parts and group["lr"] == begun):
                    _set_rate(group, rate)

    def _set_rates(self, rates: list[Any]) -> None:
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            _set_rate(group, rate)
        self._scheduler._last_lr = rates

    def _fitting(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state for as many groups as there are now; only that of a closed form can be made from that of other groups."""
        rates = state.get("base_lrs", state.get("_last_lr"))
        number = len(self._optimizer.param_groups)
        if not isinstance(rates, (list, tuple)) or len(rates) == number:
            return state
        if not fits_any_groups(self._scheduler) or any(state.get("lr_lambdas", ())):
            raise CheckpointLoadError.misfit(
                f"The schedule in the checkpoint, {type(self._scheduler).__name__}, is that of {len(rates)} parameter groups, "
                f"and the optimizer has {number} now. Make the same groups as before (optimizer_groups), or start the schedule "
                'anew with skip_checkpoint_components=["scheduler"].'
            )
        return {**state, "lr_lambdas": [None] * number}


def fits_any_groups(scheduler: LRSchedulerT) -> bool:
    """Whether the state of a schedule says nothing of its groups: one of closed form, by functions without a state."""
    # Of other functions torch saves what they have as attributes: nothing of a `partial`.
    return isinstance(scheduler, LambdaLR) and not any(scheduler.state_dict()["lr_lambdas"])


@contextlib.contextmanager
def kept_rates(optimizer: OptimizerT) -> Iterator[None]:
    """What schedules change in an optimizer is afterwards as it was before."""
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
        # Compiled optimizers hold on to it.
        group[name].copy_(torch.as_tensor(value))
    else:
        group[name] = value


def _last_rates(scheduler: object) -> list[Any]:
    return list(getattr(scheduler, "_last_lr", ()))


def _parts(scheduler: object) -> Iterator[Any]:
    """The schedules that a schedule is made of; itself, if it is not made of others."""
    nested = getattr(scheduler, "_schedulers", None)
    if nested is None:
        yield scheduler
    for part in nested or ():
        yield from _parts(part)


def _scaled(rates: list[Any], asked: list[Any], saved: list[Any]) -> list[Any]:
    return [rate * new / old if old else rate for rate, new, old in zip(rates, asked, saved, strict=True)]
