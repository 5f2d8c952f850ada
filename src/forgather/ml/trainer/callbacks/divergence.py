"""DivergenceDetector callback: stops training when the loss is NaN, infinite, or rises and stays high.

Invariant: weights that belong to a non-finite loss are never saved over good checkpoints.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from forgather.ml.checkpoint.state.state_schema import Schema, count, number, optional
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.callbacks.support.state_checks import check_callback_state
from forgather.ml.trainer.trainer_types import TrainerCallback, TrainerControl, TrainerState

logger = logging.getLogger(__name__)

_STATE = Schema({"smoothed": optional(number), "best": optional(number), "best_step": count, "num_above": count})


class DivergenceDetector(TrainerCallback):
    """Callback that stops training if the loss is NaN or infinite, or if the smoothed loss stays above its best.

    `threshold` is the allowed rise above the best, as a fraction of the best. `patience` is the number of consecutive
    log records above this limit. `smoothing` is the weight of the past in the moving average (0: no smoothing).

    `action="stop"` ends like the last step, with a checkpoint. "abort" ends without one, so that a resume starts from
    an older checkpoint. With a non-finite loss neither action saves: a resume would start from non-finite weights.
    """

    reads_final_metrics = True

    def __init__(self, action: str = "stop", threshold: float = 0.5, patience: int = 3, smoothing: float = 0.9) -> None:
        _check(action, threshold, patience, smoothing)
        self._action = action
        self._threshold = threshold
        self._patience = patience
        self._smoothing = smoothing
        self._smoothed: float | None = None
        self._best = math.inf
        self._best_step = 0
        self._num_above = 0
        self._last_loss: Tensor | float | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        # The same callback may serve a second run. A resumed run keeps the state of its checkpoint.
        if state.global_step == 0:
            self.load_state_dict({"smoothed": None, "best": None, "best_step": 0, "num_above": 0})

    def on_train_metrics(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        loss: Tensor | float,
        **kwargs: object,
    ) -> None:
        # Not converted to a float, which would wait for the device at every step.
        self._last_loss = loss

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Check the loss of a step that will be saved."""
        # Log records may come too late: a checkpoint with NaN weights could already have rotated out a good one.
        # Reading the loss waits for the device, but so does the save.
        by_steps = args.save_strategy == "steps" and state.global_step % args.save_steps == 0
        by_epoch = args.save_strategy == "epoch" and state.epoch >= state.raw_epoch + 1
        if control.should_abort_without_save or self._last_loss is None:
            return
        if (by_steps or by_epoch) and not math.isfinite(float(self._last_loss)):
            self._act(f"the loss is {float(self._last_loss)}", False, state, control)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any],
        **kwargs: object,
    ) -> None:
        if "loss" not in logs or control.should_abort_without_save:
            return
        loss = float(logs["loss"])
        reason = self._find_reason(loss, state.global_step)
        if reason is not None:
            self._act(reason, self._action == "stop" and math.isfinite(loss), state, control)

    def state_dict(self) -> dict[str, Any]:
        return {
            "smoothed": self._smoothed,
            "best": None if math.isinf(self._best) else self._best,
            "best_step": self._best_step,
            "num_above": self._num_above,
        }

    def check_state_dict(self, state_dict: object) -> None:
        check_callback_state(self, _STATE, state_dict)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.check_state_dict(state_dict)
        self._smoothed = state_dict["smoothed"]
        self._best = math.inf if state_dict["best"] is None else state_dict["best"]
        self._best_step = state_dict["best_step"]
        self._num_above = state_dict["num_above"]

    def _find_reason(self, loss: float, step: int) -> str | None:
        if not math.isfinite(loss):
            # Do not add it to the moving average, which is checkpointed: a resumed run could never recover from NaN.
            return f"the loss is {loss}"
        past = loss if self._smoothed is None else self._smoothed
        smoothed = self._smoothing * past + (1 - self._smoothing) * loss
        self._smoothed = smoothed
        if smoothed < self._best:
            self._best, self._best_step = smoothed, step
        is_above = smoothed > self._best + self._threshold * abs(self._best)
        self._num_above = self._num_above + 1 if is_above else 0
        if self._num_above < self._patience:
            return None
        return (
            f"the smoothed loss is {smoothed:.4g} and has been more than {self._threshold:.0%} above its best "
            f"({self._best:.4g} at step {self._best_step}) in the last {self._num_above} log record(s)"
        )

    def _act(self, reason: str, saves: bool, state: TrainerState, control: TrainerControl) -> None:
        control.should_training_stop = True
        if not saves:
            control.should_abort_without_save = True
        if state.is_world_process_zero:
            verb = "is aborted" if self._action == "abort" else "stops"
            outcome = f"Training {verb}" if saves else f"Training {verb} without saving"
            logger.error("Divergence at step %d: %s. %s.", state.global_step, reason, outcome)


def _check(action: str, threshold: float, patience: int, smoothing: float) -> None:
    if action not in ("stop", "abort"):
        raise ValueError(f"action={action!r} cannot be used: choose 'stop' (with a checkpoint) or 'abort' (without).")
    if threshold < 0:
        raise ValueError(f"threshold={threshold} cannot be used: it is a fraction of the best loss, 0 or more.")
    if patience < 1:
        raise ValueError(f"patience={patience} cannot be used: it is a number of log records, 1 or more.")
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing={smoothing} cannot be used: it is the weight of the past, from 0 to below 1.")
