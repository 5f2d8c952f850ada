"""Calls of `compute_metrics`, with checks of its result.

All ranks call the function on the same arrays, and use the result of rank 0. An error on one rank is raised on all. The
collector calls `computed`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from forgather.ml.trainer.metrics.nested import filled, layout_of, leaves_of
from forgather.ml.trainer.ranks.team import Team

Compute = Callable[[Any], Any]
DURING = "computing metrics"


class Sample(NamedTuple):
    """Predictions of a batch or of a dataset, with what `include_for_metrics` adds. Absent values are None."""

    predictions: Any
    label_ids: Any
    inputs: Any = None
    losses: Any = None


def computed(team: Team, compute: Callable[[], object], prefix: str) -> dict[str, Any]:
    """Return the metrics of a call, under names with the prefix, equal on all ranks; collective."""
    metrics: dict[str, Any] = {}
    with team.agreement(DURING):
        metrics = with_prefix(as_numbers(compute()), prefix)
    # Rank 0 decides: a function that draws random numbers or reads the clock would give each rank another value.
    return team.broadcast(metrics)


def eval_prediction(sample: Sample) -> Any:
    """Return the argument of `compute_metrics`."""
    # Imported on demand, since transformers takes seconds to import.
    from transformers import EvalPrediction

    return EvalPrediction(*sample)


def as_numpy(sample: Sample) -> Sample:
    """Return the sample with numpy arrays. Half-precision numbers become float32, for sums without overflow."""
    arrays = [_array(leaf) for leaf in leaves_of(sample)]
    return Sample(*filled(layout_of(sample), arrays))


def _array(tensor: Tensor) -> np.ndarray[Any, Any]:
    is_half = tensor.dtype in (torch.bfloat16, torch.float16)
    array: np.ndarray[Any, Any] = (tensor.float() if is_half else tensor).numpy()
    return array


def as_numbers(metrics: object) -> dict[str, int | float | bool]:
    """Return the metrics as Python numbers; raise TypeError for other values."""
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"compute_metrics returned {type(metrics).__name__}, but it must return a dict of numbers by name, such as "
            '{"accuracy": 0.5}.'
        )
    return {str(name): _number(str(name), value) for name, value in metrics.items()}


def _number(name: str, value: object) -> int | float | bool:
    is_scalar = value.numel() == 1 if isinstance(value, Tensor) else getattr(value, "size", None) == 1
    if is_scalar and isinstance(value, (np.generic, np.ndarray, Tensor)):
        value = value.item()
    if isinstance(value, (bool, int, float)):
        return value
    raise TypeError(
        f"compute_metrics returned {type(value).__name__} as {name!r}, but each metric must be one number: it is logged, and "
        f"the best model is chosen by it. Return a mean, or several entries such as {name + '_0'!r}."
    )


def with_prefix(metrics: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the metrics under names that start with the prefix."""
    return {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": value for name, value in metrics.items()}
