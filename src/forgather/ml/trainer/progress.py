"""The components `trainer` and `scheduler`: how far training is, and its schedule."""

import contextlib
import copy
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.checkpoint.store import CHECKPOINTS_FOLDER
from forgather.ml.trainer.trainer_types import LRSchedulerT, OptimizerT

_STATE_FIELDS = (
    "epoch",
    "global_step",
    "raw_epoch",
    "epoch_start_step",
    "epoch_train_steps",
    "log_history",
    "best_metric",
    "num_input_tokens_seen",
    "total_flos",
)


class TrainerProgress:
    """Takes and gives back what the loop of a trainer knows: counters, sums since the last log, loss scale."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        best = trainer.state.best_model_checkpoint
        return {
            "state": {name: getattr(trainer.state, name) for name in _STATE_FIELDS},
            # A name, because an output directory may be moved.
            "best_model_checkpoint": None if best is None else os.path.basename(best),
            "interval": trainer._interval.state_dict(),
            "totals": trainer._totals.state_dict(),
            "amp": trainer.amp.state_dict(),
            "best_saved_metric": trainer._best_saved_metric,
            "should_epoch_stop": trainer.control.should_epoch_stop,
            "evaluated_step": trainer._evaluated_step,
            "evaluation_is_pending": trainer._evaluation_is_pending,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        for name, value in state["state"].items():
            setattr(trainer.state, name, value)
        best = state["best_model_checkpoint"]
        folder = os.path.join(trainer.args.output_dir, CHECKPOINTS_FOLDER)
        trainer.state.best_model_checkpoint = None if best is None else os.path.join(folder, best)
        trainer._best_saved_metric = state["best_saved_metric"]
        trainer._interval.load_state_dict(state["interval"])
        trainer._totals.load_state_dict(state["totals"])
        trainer.amp.load_state_dict(state["amp"])
        trainer.control.should_epoch_stop = state["should_epoch_stop"]
        trainer._evaluated_step = state["evaluated_step"]
        trainer._evaluation_is_pending = state["evaluation_is_pending"]
        trainer._saved_step = trainer.state.global_step
        trainer._resumed_in_epoch = True

    def forget_best(self) -> None:
        """Let the best be chosen anew, after a checkpoint of another run, whose best one this run has not got."""
        trainer = self._trainer
        trainer.state.best_model_checkpoint = trainer.state.best_metric = trainer._best_saved_metric = None


class SchedulerState:
    """A schedule that follows the checkpoint, but acts on the learning rate that the user has asked for now."""

    def __init__(self, scheduler: LRSchedulerT, optimizer: OptimizerT) -> None:
        self._scheduler = scheduler
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._scheduler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Comes after the optimizer, whose groups keep a rate that the user changed since the checkpoint."""
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
        if rates is None or len(rates) == number:
            return state
        if not fits_any_groups(self._scheduler) or any(state.get("lr_lambdas", ())):
            raise CheckpointLoadError(
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


def _set_rate(group: dict[str, Any], value: Any, name: str = "lr") -> None:
    if isinstance(group[name], Tensor):
        # Compiled optimizers hold on to it.
        group[name].copy_(torch.as_tensor(value))
    else:
        group[name] = value


def _last_rates(scheduler: Any) -> list[Any]:
    return list(getattr(scheduler, "_last_lr", ()))


def _parts(scheduler: Any) -> Iterator[Any]:
    """The schedules that a schedule is made of; itself, if it is not made of others."""
    nested = getattr(scheduler, "_schedulers", None)
    if nested is None:
        yield scheduler
    for part in nested or ():
        yield from _parts(part)


def _scaled(rates: list[Any], asked: list[Any], saved: list[Any]) -> list[Any]:
    return [rate * new / old if old else rate for rate, new, old in zip(rates, asked, saved, strict=True)]
