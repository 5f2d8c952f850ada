"""EarlyStopping callback: stops training when an evaluation metric no longer improves.

The count of evaluations without improvement is checkpointed, so that a resumed run stops at the same step.
"""

import logging
from collections.abc import Mapping
from typing import Any

from forgather.ml.checkpoint.retention import default_greater_is_better
from forgather.ml.checkpoint.state.state_schema import Schema, count, number, optional
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.callbacks.support.state_checks import check_callback_state
from forgather.ml.trainer.trainer_types import TrainerCallback, TrainerControl, TrainerState

logger = logging.getLogger(__name__)

_STATE = Schema({"best": optional(number), "best_step": count, "num_without_improvement": count})


class EarlyStopping(TrainerCallback):
    """Callback that stops training after `patience` consecutive evaluations without an improvement over `threshold`.

    `metric` is a key of the evaluation metrics, with or without the prefix "eval_". With `greater_is_better=None`,
    lower is better for names that end in "loss" or "perplexity". For all other names, higher is better.
    """

    reads_final_metrics = True

    def __init__(
        self,
        patience: int = 1,
        threshold: float = 0.0,
        metric: str = "eval_loss",
        greater_is_better: bool | None = None,
    ) -> None:
        if patience < 1:
            raise ValueError(f"patience={patience} cannot be used: it is a number of evaluations, 1 or more.")
        if threshold < 0:
            raise ValueError(f"threshold={threshold} cannot be used: it is the minimum improvement, 0 or more.")
        self._patience = patience
        self._threshold = threshold
        self._metric = metric
        self._greater_is_better = default_greater_is_better(metric) if greater_is_better is None else greater_is_better
        self._best: float | None = None
        self._best_step = 0
        self._num_without_improvement = 0
        self._has_warned = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        # The same callback may serve a second run. A resumed run keeps the state of its checkpoint.
        if state.global_step == 0:
            self.load_state_dict({"best": None, "best_step": 0, "num_without_improvement": 0})

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any],
        **kwargs: object,
    ) -> None:
        value = metrics.get(self._metric, metrics.get(f"eval_{self._metric}"))
        if value is None:
            self._warn_missing(metrics)
            return
        if self._is_improvement(float(value)):
            self._best, self._best_step = float(value), state.global_step
            self._num_without_improvement = 0
            return
        self._num_without_improvement += 1
        if self._num_without_improvement >= self._patience:
            self._stop(float(value), state, control)

    def state_dict(self) -> dict[str, Any]:
        return {
            "best": self._best,
            "best_step": self._best_step,
            "num_without_improvement": self._num_without_improvement,
        }

    def check_state_dict(self, state_dict: object) -> None:
        check_callback_state(self, _STATE, state_dict)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.check_state_dict(state_dict)
        self._best = state_dict["best"]
        self._best_step = state_dict["best_step"]
        self._num_without_improvement = state_dict["num_without_improvement"]

    def _is_improvement(self, value: float) -> bool:
        if value != value:  # NaN is never an improvement, not even as the first value.
            return False
        if self._best is None:
            return True
        gain = value - self._best if self._greater_is_better else self._best - value
        return gain > self._threshold

    def _stop(self, value: float, state: TrainerState, control: TrainerControl) -> None:
        control.should_training_stop = True
        if not state.is_world_process_zero:
            return
        best = (
            "there is no best value"
            if self._best is None
            else f"the best is {self._best:.4g} at step {self._best_step}"
        )
        logger.info(
            "Early stopping at step %d: %s is %.4g, %s. The last %d evaluation(s) did not improve it by more than %g.",
            state.global_step,
            self._metric,
            value,
            best,
            self._num_without_improvement,
            self._threshold,
        )

    def _warn_missing(self, metrics: Mapping[str, Any]) -> None:
        # With several evaluation datasets, the metric may belong to another one.
        if self._has_warned or "eval_loss" not in metrics:
            return
        self._has_warned = True
        logger.warning(
            "EarlyStopping cannot stop training: its metric %r is missing from the evaluation, which returns %s. Set "
            "metric to one of these.",
            self._metric,
            ", ".join(sorted(metrics)) or "none",
        )
