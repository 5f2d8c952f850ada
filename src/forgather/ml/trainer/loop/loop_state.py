"""Loop state: counters, callback requests and metrics of the training loop, the content of the component "trainer".

`Trainer.state_dict` and `Trainer.load_state_dict` delegate to it. `Reporter`, `Evaluator` and `Saver` share one
`LoopState`. A state from a checkpoint is validated against a schema before any of it is loaded.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forgather.ml.checkpoint.state.state_schema import (
    Schema,
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
    relative_name,
    require_mapping,
    text,
)
from forgather.ml.trainer.amp import AMPContext
from forgather.ml.trainer.loop.cadence import Cadence
from forgather.ml.trainer.loop.metrics import IntervalMetrics, RunTotals
from forgather.ml.trainer.loop.nonfinite import GradientWatch, LateFlag
from forgather.ml.trainer.samples.skipped import SKIP_SAMPLES, SKIP_STEPS, SkippedData
from forgather.ml.trainer.step_loss.model_loss import LOSS_STATE, ModelLoss
from forgather.ml.trainer.trainer_types import TrainerControl, TrainerState

# Other keys come from the user's metrics and callbacks, so their values are not checked.
_RECORD = every(mapping_of(text, anything), Schema({"step": count}, may_lack=["step"]))
_STATE = Schema(
    {
        "epoch": amount,
        "global_step": count,
        "raw_epoch": count,
        # May be negative: `StepPlan.replan` moves the start of an epoch back if the epoch has more steps now.
        "epoch_start_step": integer,
        "epoch_train_steps": positive,
        "log_history": list_of(_RECORD),
        "best_metric": optional(number),
        "num_input_tokens_seen": count,
        "total_flos": amount,
    },
    may_lack=["epoch_train_steps"],
)
# Defaults for keys that checkpoints of earlier versions lack; `is_scheduled=None` means unknown.
_SINCE_ADDED = {
    "best_saved_metric": None,
    "should_epoch_stop": False,
    "should_training_stop": False,
    "is_scheduled": None,
    "eval_metrics": None,
    "nonfinite_in_a_row": 0,
    "found_batch_size": None,
    SKIP_SAMPLES: (),
    SKIP_STEPS: (),
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
        "found_batch_size": optional(positive),
        SKIP_SAMPLES: list_of(count),
        SKIP_STEPS: list_of(count),
        "loss": LOSS_STATE,
    },
    may_lack=[*_SINCE_ADDED, "loss"],
)


@dataclass
class LoopState:
    """Counters, callback requests, sums since the last log, and the steps of the last evaluation and save."""

    checkpoints: str
    """Folder of checkpoints."""
    state: TrainerState
    control: TrainerControl
    cadence: Cadence
    amp: AMPContext
    loss: ModelLoss
    watch: GradientWatch
    interval: IntervalMetrics
    totals: RunTotals = field(default_factory=RunTotals)
    evaluated_step: int = -1
    eval_metrics: dict[str, Any] | None = None
    evaluation_is_pending: bool = False
    best_saved_metric: float | None = None
    saved_step: int = -1
    saved_path: str = ""
    scheduled_step: int = -1
    """The last step with a save requested by the settings or a callback. Saves after a stop signal do not count."""
    is_leaving: bool = False
    resumed_in_epoch: bool = False
    skipped: SkippedData = field(default_factory=SkippedData)
    found_batch_size: int | None = None
    """Samples per forward pass that fit into memory (`auto_find_batch_size`); None without an out-of-memory error."""
    left_out: LateFlag | None = None
    """Whether GradScaler skipped the last step, while the flag is still on its way to the host; else None."""

    def state_dict(self) -> dict[str, Any]:
        best, step = self.state.best_model_checkpoint, self.state.global_step
        return {
            "state": self.state.state_dict(),
            # Only the name, because the output directory may be moved.
            "best_model_checkpoint": None if best is None else os.path.basename(os.path.normpath(best)),
            "interval": self.interval.state_dict(),
            "totals": self.totals.state_dict(),
            "amp": self.amp.state_dict(),
            "best_saved_metric": self.best_saved_metric,
            # Callbacks may assign the result of a comparison, such as a NumPy bool or a tensor.
            "should_epoch_stop": bool(self.control.should_epoch_stop),
            "nonfinite_in_a_row": self.watch.in_a_row,
            # Only when leaving on a signal, before the loop could obey the request. A run that has ended may be resumed
            # to train longer, and must not stop at once.
            "should_training_stop": bool(self.control.should_training_stop and self.is_leaving),
            "evaluated_step": self.evaluated_step,
            # A later save of the same step, after a resume, needs the metrics of this step.
            "eval_metrics": self.eval_metrics if self.evaluated_step == step else None,
            "evaluation_is_pending": self.evaluation_is_pending or self.cadence.evaluation_is_due(self.evaluated_step),
            "is_scheduled": self.scheduled_step == step,
            "found_batch_size": self.found_batch_size,
            **self.skipped.state_dict(),
            "loss": self.loss.state_dict(),
        }

    def check_state_dict(self, state: object) -> None:
        """Raise `CheckpointLoadError` for a state that `load_state_dict` cannot use; unknown keys are ignored."""
        _PROGRESS.check(state, "trainer")
        assert isinstance(state, Mapping)
        self.interval.check_state_dict(state["interval"])
        self.totals.check_state_dict(state["totals"])
        self.amp.check_state_dict(state["amp"])
        self.loss.check_state_dict(state.get("loss"))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Check everything first: an invalid state must not leave the loop half loaded.
        self.check_state_dict(state)
        state = {**_SINCE_ADDED, **state}
        self.state.load_state_dict(state["state"])
        best = state["best_model_checkpoint"]
        self.state.best_model_checkpoint = None if best is None else os.path.join(self.checkpoints, best)
        self.best_saved_metric = state["best_saved_metric"]
        self.interval.load_state_dict(state["interval"])
        self.totals.load_state_dict(state["totals"])
        self.amp.load_state_dict(state["amp"])
        self.control.should_epoch_stop = state["should_epoch_stop"]
        self.watch.resume(state["nonfinite_in_a_row"])
        self.control.should_training_stop = state["should_training_stop"]
        self.evaluated_step, self.eval_metrics = state["evaluated_step"], state["eval_metrics"]
        self.evaluation_is_pending = state["evaluation_is_pending"]
        self.found_batch_size = state["found_batch_size"]
        self.skipped.load_state_dict(state)
        self._resume_saves(state["is_scheduled"])
        self.resumed_in_epoch = True
        if "loss" in state:
            self.loss.load_state_dict(state["loss"])
        else:
            self.loss.keep_old_rule()

    def _resume_saves(self, is_scheduled: bool | None) -> None:
        step = self.state.global_step
        if is_scheduled is None:
            # Earlier versions did not save the flag. With a pending evaluation, `Cadence.save_was_due` decides.
            is_scheduled = not self.evaluation_is_pending
        self.scheduled_step = step if is_scheduled else -1
        # With a stop request, the step is saved again at the end of training, without the request.
        self.saved_step = -1 if self.control.should_training_stop else step

    def begin_next_epoch(self, accumulation: int) -> None:
        state = self.state
        # A resumed epoch may have no batches left. Any other epoch without a step would repeat forever.
        if state.global_step == state.epoch_start_step and not self.resumed_in_epoch:
            raise RuntimeError(
                f"Epoch {state.raw_epoch} of the training data had no batches, so training cannot continue. Check the "
                "dataset, per_device_train_batch_size and dataloader_drop_last, which drops incomplete batches and steps of "
                f"fewer than gradient_accumulation_steps={accumulation} batches."
            )
        self.resumed_in_epoch = False
        state.raw_epoch += 1
        state.epoch = float(state.raw_epoch)
        state.epoch_start_step = state.global_step

    def import_progress(self, global_step: int, epoch: float) -> None:
        """Adopt the position of a run of another program; the epoch restarts at its first batch."""
        self.state.global_step = self.state.epoch_start_step = global_step
        self.state.raw_epoch = int(epoch)
        self.state.epoch = float(self.state.raw_epoch)
        self.resumed_in_epoch = True

    def forget_best(self) -> None:
        """Reset the best metric and checkpoint after loading another run, since its best checkpoint is not in this run."""
        self.state.best_model_checkpoint = self.state.best_metric = self.best_saved_metric = None
