"""Metrics of single rounds (`batch_eval_metrics`): `compute_metrics` sees the batches of all ranks, round by round.

No rank keeps more than two rounds. The last call has `compute_result=True`, so a round waits until the next one exists or
the evaluation ends. The collector calls it in every round on all ranks.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from forgather.ml.trainer.metrics.computing import Sample, computed, eval_prediction
from forgather.ml.trainer.metrics.gathering import joined, require_one_layout
from forgather.ml.trainer.metrics.nested import filled, layout_of, leaves_of
from forgather.ml.trainer.ranks.team import Team


class BatchMetrics:
    """Rounds of an evaluation on their way to `compute_metrics`."""

    def __init__(self, team: Team, part: int, device: torch.device, compute: Callable[..., Any]) -> None:
        _require_keyword(compute)
        self._team = team
        self._part = part
        self._device = device
        self._compute = compute
        self._held: Sample | None = None

    def feed(self) -> None:
        """Pass the last round to `compute_metrics`; called once the next round exists. Not a collective."""
        held, self._held = self._held, None
        if held is not None:
            self._compute(eval_prediction(held), compute_result=False)

    def hold(self, own: Sample | None) -> None:
        """Gather a round; `own` is None on a rank without a batch. Collective."""
        # One process keeps its tensors on the device. Ranks exchange theirs over gloo, in host memory.
        sent = own if self._team.size == 1 else _moved(own, torch.device("cpu"))
        told = sorted(self._team.gather((self._part, sent)), key=lambda one: one[0])
        samples = [sample for _, sample in told if sample is not None]
        if samples:
            whole = samples[0] if len(samples) == 1 else _joined(samples)
            self._held = _moved(whole, self._device)

    def result(self, prefix: str) -> dict[str, Any]:
        """Pass the last round to `compute_metrics`, and return the metrics of the evaluation; collective."""
        held, self._held = self._held, None
        if held is None or held.label_ids is None:
            return {}
        return computed(self._team, lambda: self._compute(eval_prediction(held), compute_result=True), prefix)


def _joined(samples: list[Sample]) -> Sample:
    """Return the rows of all samples, in this order."""
    require_one_layout([layout_of(sample) for sample in samples])
    leaves = zip(*(leaves_of(sample) for sample in samples), strict=True)
    return Sample(*filled(layout_of(samples[0]), [joined(parts) for parts in leaves]))


def _moved(sample: Sample | None, device: torch.device) -> Sample | None:
    if sample is None:
        return None
    return Sample(*filled(layout_of(sample), [leaf.to(device) for leaf in leaves_of(sample)]))


def _require_keyword(compute: Callable[..., Any]) -> None:
    parameters = inspect.signature(compute).parameters.values()
    if not any(one.name == "compute_result" or one.kind is one.VAR_KEYWORD for one in parameters):
        raise ValueError(
            "batch_eval_metrics=True calls compute_metrics(prediction, compute_result=...) for each batch, but compute_metrics "
            "has no parameter 'compute_result'. Add it, collect statistics in each call, and return the metrics if it is True. "
            "Or set batch_eval_metrics=False."
        )
