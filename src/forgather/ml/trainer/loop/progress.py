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
from forgather.ml.checkpoint.state.state_schema import (
    Schema,
    Violation,
    amount,
    anything,
    count,
    every,
    flag,
    integer,
    list_of,
    mapping_of,
    number,
    optional,
    position,
    positive,
    refusal,
    relative_name,
    require_mapping,
    text,
)
from forgather.ml.checkpoint.store import CHECKPOINTS_FOLDER
from forgather.ml.trainer.loop.scheduler_schema import (
    UnknownKeyViolation,
    group_lists,
    like_scheduler,
    mismatch,
    unwrapped,
)
from forgather.ml.trainer.step_loss.model_loss import LOSS_STATE
from forgather.ml.trainer.trainer_types import LRSchedulerT, OptimizerT

# The rest of a record is what the user's metrics and callbacks put there.
_RECORD = every(mapping_of(text, anything), Schema({"step": count}, may_lack=["step"]))
_STATE = Schema(
    {
        "epoch": amount,
        "global_step": count,
        "raw_epoch": count,
        # Before the first step, if an epoch has more steps since the checkpoint that it was begun with.
        "epoch_start_step": integer,
        "epoch_train_steps": positive,
        "log_history": list_of(_RECORD),
        "best_metric": optional(number),
        "num_input_tokens_seen": count,
        "total_flos": amount,
    },
    may_lack=["epoch_train_steps"],
)
# What a checkpoint from before a key was saved stands for: the value at the beginning of a run.
_SINCE_ADDED = {
    "best_saved_metric": None,
    "should_epoch_stop": False,
    "should_training_stop": False,
    "is_scheduled": None,
    "eval_metrics": None,
    "nonfinite_in_a_row": 0,
}
_PROGRESS = Schema(
    {
        "state": _STATE,
        "best_model_checkpoint": optional(relative_name),
        "interval": require_mapping,
        "totals": require_mapping,
        "amp": require_mapping,
        "best_saved_metric": optional(number),
        "should_epoch_stop": flag,
        "nonfinite_in_a_row": count,
        "should_training_stop": flag,
        "evaluated_step": position,
        "eval_metrics": optional(mapping_of(text, anything)),
        "evaluation_is_pending": flag,
        "is_scheduled": flag,
        "loss": LOSS_STATE,
    },
    may_lack=[*_SINCE_ADDED, "loss"],
)


class TrainerProgress:
    """Takes and gives back what the loop of a trainer knows: counters, sums since the last log, loss scale."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        best = trainer.state.best_model_checkpoint
        return {
            "state": {name: getattr(trainer.state, name) for name in _STATE.fields},
            # A name, because an output directory may be moved.
            "best_model_checkpoint": None if best is None else os.path.basename(os.path.normpath(best)),
            "interval": trainer._interval.state_dict(),
            "totals": trainer._totals.state_dict(),
            "amp": trainer.amp.state_dict(),
            "best_saved_metric": trainer._best_saved_metric,
            # Callbacks may ask with whatever a comparison gave them.
            "should_epoch_stop": bool(trainer.control.should_epoch_stop),
            "nonfinite_in_a_row": trainer._watch.in_a_row,
            # Only of a run that leaves before it could follow the request; one that has ended may be resumed to train on.
            "should_training_stop": bool(trainer.control.should_training_stop and trainer._is_leaving),
            "evaluated_step": trainer._evaluated_step,
            # Those of this step, which a later save of the same step needs.
            "eval_metrics": trainer._eval_metrics if trainer._evaluated_step == trainer.state.global_step else None,
            "evaluation_is_pending": trainer._evaluation_is_pending or trainer._evaluation_is_due(),
            "is_scheduled": trainer._scheduled_step == trainer.state.global_step,
            "loss": trainer.model_loss.state_dict(),
        }

    def check_state_dict(self, state: Any) -> None:
        """Raise a `CheckpointLoadError` for a state that `load_state_dict` could not use; keys unknown here are ignored."""
        trainer = self._trainer
        _PROGRESS.check(state, "trainer")
        trainer._interval.check_state_dict(state["interval"])
        trainer._totals.check_state_dict(state["totals"])
        if hasattr(trainer.amp, "check_state_dict"):
            trainer.amp.check_state_dict(state["amp"])
        trainer.model_loss.check_state_dict(state.get("loss"))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check_state_dict(state)
        trainer = self._trainer
        state = {**_SINCE_ADDED, **state}
        for name, value in _STATE.known(state["state"]).items():
            setattr(trainer.state, name, value)
        best = state["best_model_checkpoint"]
        folder = os.path.join(trainer.args.output_dir, CHECKPOINTS_FOLDER)
        trainer.state.best_model_checkpoint = None if best is None else os.path.join(folder, best)
        trainer._best_saved_metric = state["best_saved_metric"]
        trainer._interval.load_state_dict(state["interval"])
        trainer._totals.load_state_dict(state["totals"])
        trainer.amp.load_state_dict(state["amp"])
        trainer.control.should_epoch_stop = state["should_epoch_stop"]
        trainer._watch.resume(state["nonfinite_in_a_row"])
        trainer.control.should_training_stop = state["should_training_stop"]
        trainer._evaluated_step, trainer._eval_metrics = state["evaluated_step"], state["eval_metrics"]
        trainer._evaluation_is_pending = state["evaluation_is_pending"]
        is_scheduled = state["is_scheduled"]
        if is_scheduled is None:
            # A checkpoint of an earlier version: with a pending evaluation, the settings decide whether it was.
            is_scheduled = not trainer._evaluation_is_pending
        trainer._scheduled_step = trainer.state.global_step if is_scheduled else -1
        # With a request to stop, the last save is made again, without the request.
        trainer._saved_step = -1 if trainer.control.should_training_stop else trainer.state.global_step
        trainer._resumed_in_epoch = True
        if "loss" in state:
            trainer.model_loss.load_state_dict(state["loss"])
        else:
            trainer.model_loss.keep_old_rule()

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
