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
    if greater_is_better is None:
        greater_is_better = default_greater_is_better(metric_key)
    best = state.best_metric
    is_best = value == value and (best is None or (value > best if greater_is_better else value < best))
    if is_best:
        state.best_metric = value
    return is_best
