"""Which checkpoint is the best so far."""

from collections.abc import Mapping
from typing import Any

from forgather.ml.checkpoint.retention import default_greater_is_better, metric_value
from forgather.ml.trainer.trainer_types import TrainerState


def note_best_metric(
    state: TrainerState, metrics: Mapping[str, Any], metric_key: str, greater_is_better: bool | None
) -> bool:
    """Enter an evaluation into the state; True when it is the best yet."""
    value = metric_value(metrics, metric_key)
    is_best = is_better(value, state.best_metric, metric_key, greater_is_better)
    if is_best:
        state.best_metric = value
    return is_best


def is_better(value: float, best: float | None, metric_key: str, greater_is_better: bool | None) -> bool:
    """Whether a value of a metric is better than the best before; NaN never is."""
    if greater_is_better is None:
        greater_is_better = default_greater_is_better(metric_key)
    return value == value and (best is None or (value > best if greater_is_better else value < best))
