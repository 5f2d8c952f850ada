"""Collector of one evaluation: takes the predictions of each batch, and computes the metrics at the end.

It exists only if metrics or predictions are asked for. Memory on the device is bounded by one batch (or by
`eval_accumulation_steps`), and on the host by what `preprocess_logits_for_metrics` returns. `Evaluator` builds it.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forgather.ml.distributed.watch import EVALUATION_START, in_phase
from forgather.ml.trainer.arguments.training_arguments import BaseTrainingArguments
from forgather.ml.trainer.metrics.batch_metrics import BatchMetrics
from forgather.ml.trainer.metrics.computing import Sample, as_numpy, computed, eval_prediction
from forgather.ml.trainer.metrics.gathering import gathered
from forgather.ml.trainer.metrics.host_copies import HostCopies
from forgather.ml.trainer.metrics.nested import Layout, filled, layout_of, leaves_of
from forgather.ml.trainer.ranks.team import Team
from forgather.ml.trainer.trainer_types import ComputeMetricsT

logger = logging.getLogger(__name__)

PreprocessLogits = Callable[[Any, Any], Any]
COLLECTING = "collecting predictions"


@dataclass(frozen=True)
class Request:
    """Requested results of an evaluation: metrics, predictions, and the prefix of names."""

    prefix: str = "eval"
    collects: bool = False
    """Whether metrics or predictions are asked for."""
    keeps: bool = False
    """Whether the caller gets the predictions, also with `batch_eval_metrics`."""
    allows_no_labels: bool = False
    """Whether batches without labels are predicted without a loss."""


class Collected(NamedTuple):
    """Result of a collector, equal on all ranks. Predictions are None if only their metrics were asked for."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Position of a rank in an evaluation."""

    team: Team
    part: int
    """Number of this rank among the data-parallel ranks."""
    device: torch.device
    main_input: str
    """Name of the model's main input."""


class Collector:
    """Predictions of an evaluation. All ranks call `end_round` in every round, and `finish` once."""

    def __init__(
        self,
        place: Place,
        request: Request,
        args: BaseTrainingArguments,
        compute: ComputeMetricsT | None,
        preprocess: PreprocessLogits | None,
    ) -> None:
        self._place = place
        self._request = request
        self._included = args.include_for_metrics
        self._compute = compute
        self._preprocess = preprocess
        by_batch = args.batch_eval_metrics and compute is not None
        self._batches = BatchMetrics(place.team, place.part, place.device, compute) if by_batch and compute else None
        self._copies = HostCopies(args.eval_accumulation_steps) if request.keeps or not by_batch else None
        self._layout: Layout = None
        self._taken: tuple[Mapping[str, Any], Mapping[str, Any], int] | None = None
        self._has_failed = False

    def take(self, prediction: Mapping[str, Any], batch: Mapping[str, Any], num_samples: int) -> None:
        """Take the result of `_prediction_step` for a batch of this rank."""
        self._taken = (prediction, batch, num_samples)

    def end_round(self) -> None:
        """Process the batch of this round, if this rank took one; collective with `batch_eval_metrics`."""
        # After an error, all ranks still join the rounds until they have exchanged it.
        if self._has_failed:
            return
        try:
            self._process()
        except Exception:
            self._has_failed = True
            raise

    def finish(self) -> Collected:
        """Return predictions and metrics of all samples; collective."""
        sample = Sample(None, None) if self._copies is None else self._gathered(self._copies)
        # The limit of a batch does not apply: metrics of all samples may take minutes.
        with in_phase(EVALUATION_START):
            metrics = {} if self._compute is None else self._metrics(self._compute, sample)
        return Collected(sample.predictions, sample.label_ids, metrics)

    def _process(self) -> None:
        sample: Sample | None = None
        if self._batches is None:
            sample = self._prepared()
        else:
            with self._place.team.agreement(COLLECTING):
                sample = self._prepared()
                self._batches.feed()
            self._batches.hold(sample)
        if sample is not None and self._copies is not None:
            self._keep(self._copies, sample)

    def _prepared(self) -> Sample | None:
        """Return the sample of the batch that this rank took; None without one."""
        taken, self._taken = self._taken, None
        if taken is None:
            return None
        prediction, batch, num_samples = taken
        logits, labels = prediction.get("logits"), prediction.get("labels")
        if logits is None:
            raise ValueError(
                "Metrics need predictions, but the model returned none besides the loss. Let forward return logits, or set "
                "prediction_loss_only=True."
            )
        if self._preprocess is not None:
            logits = self._preprocess(logits, labels)
        losses = _repeated(prediction.get("loss"), num_samples) if "loss" in self._included else None
        return Sample(logits, labels, self._inputs(batch) if "inputs" in self._included else None, losses)

    def _inputs(self, batch: Mapping[str, Any]) -> Any:
        if self._batches is not None:
            # As in transformers, single batches come with all inputs.
            return {name: value for name, value in batch.items() if isinstance(value, Tensor)}
        return batch.get(self._place.main_input)

    def _keep(self, copies: HostCopies, sample: Sample) -> None:
        leaves, layout = leaves_of(sample), layout_of(sample)
        if self._layout is None:
            self._layout = layout
        if layout != self._layout:
            raise ValueError(
                f"Batches have predictions of different structures, {self._layout} and {layout} (numbers stand for tensors), "
                "which cannot be joined. Make the model and preprocess_logits_for_metrics return the same structure for each "
                "batch."
            )
        copies.add(leaves)

    def _gathered(self, copies: HostCopies) -> Sample:
        place = self._place
        layout, leaves = gathered(place.team, place.part, self._layout, copies.finish())
        return Sample(None, None) if layout is None else as_numpy(Sample(*filled(layout, leaves)))

    def _metrics(self, compute: ComputeMetricsT, sample: Sample) -> dict[str, Any]:
        prefix = self._request.prefix
        if self._batches is not None:
            return self._batches.result(prefix)
        if sample.label_ids is None:
            if not self._request.allows_no_labels:
                logger.warning(
                    "compute_metrics is not called: the evaluation batches have no labels. Set label_names to the columns "
                    "with labels."
                )
            return {}
        return computed(self._place.team, lambda: compute(eval_prediction(sample)), prefix)


def _repeated(loss: object, num_samples: int) -> Tensor | None:
    """Return the mean loss of a batch once per sample."""
    return None if loss is None else torch.as_tensor(loss).detach().reshape(1).expand(num_samples)


def require_all_collecting(num_collecting: int, num_ranks: int) -> None:
    """Raise ValueError, on every rank, if only some ranks collect predictions."""
    if num_collecting not in (0, num_ranks):
        raise ValueError(
            f"compute_metrics is set on {num_collecting} of {num_ranks} ranks, but predictions are gathered from all ranks. "
            "Set it on every rank or on none."
        )
