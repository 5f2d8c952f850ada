"""Token-weighted loss: the loss of a step is one mean over all target tokens of all micro-batches and ranks.

`StepLoss` scales the loss of each micro-batch by its number of targets, so that the shares add up to this mean.
`ModelLoss` and the last pipeline stage call it.
"""

import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from forgather.ml.trainer.step_loss.loss_traits import IGNORE_INDEX, Rows, Traits, find_traits
from forgather.ml.trainer.trainer_types import LossFunctionT

__all__ = ["IGNORE_INDEX", "StepLoss", "parameters_of", "zero_without_targets"]

logger = logging.getLogger(__name__)


class StepLoss:
    """Loss function of (logits, labels) that returns the share of a micro-batch in the loss of its step.

    Three kinds of loss functions are supported:

    - a function with the argument `num_items_in_batch`, which returns sum / num_items_in_batch;
    - an object with `num_targets(labels)`, and optionally `sum_over_targets(logits, labels)`, which saves work;
    - a plain function, which returns a mean over its targets.

    A plain function is tried once, on real logits, to find its `Traits`. They record whether the first position of a
    sequence counts (causal losses shift), whether labels of -100 are ignored, and whether the loss is a sum.
    """

    def __init__(self, loss_fn: LossFunctionT, token_weighted: bool = True, head: nn.Module | None = None) -> None:
        """Wrap a loss function; with a `head` it takes hidden states instead of logits and uses the head's parameters."""
        self.loss_fn = loss_fn
        self._head = head
        self._token_weighted = token_weighted
        self._takes_count = "num_items_in_batch" in parameters_of(loss_fn)
        self._num_targets = getattr(loss_fn, "num_targets", None)
        self._sum_over_targets = getattr(loss_fn, "sum_over_targets", None)
        self._traits: Traits | None = None

    @property
    def is_resolved(self) -> bool:
        """Whether targets can be counted from labels only, without logits."""
        return self._num_targets is not None or self._traits is not None

    @property
    def needs_counts(self) -> bool:
        """Whether the share of a micro-batch depends on its number of targets."""
        return self._sum_over_targets is None

    @property
    def traits(self) -> Traits | None:
        """Traits of a plain function; None before the first batch, or if the function counts its own targets."""
        return self._traits

    def adopt(self, traits: Traits) -> None:
        """Use these traits, which this rank or another rank has found."""
        if self._traits is None and traits.is_sum:
            logger.warning(
                "The loss function returns a sum over its targets, not a mean. The loss of a step is then the sum over all "
                "micro-batches and ranks, which grows with the batch; an evaluation reports the mean. To train on the mean, "
                "return a mean, or accept num_items_in_batch and divide the sum by it."
            )
        self._traits = traits

    def resolve(self, logits: Tensor, labels: Tensor) -> None:
        """Find and adopt the traits of the loss function: which labels are targets, and its divisor."""
        self.adopt(self.found(logits, labels))

    def found(self, logits: Tensor, labels: Tensor) -> Traits:
        """Return the traits of the loss function, found on the logits and labels of a batch."""
        if logits.ndim > 0 and labels.ndim > 0 and len(logits) == len(labels):
            # Two samples show as much as the full batch, and take less memory.
            logits, labels = logits[:2], labels[:2]
        # NaN logits would make every trial NaN.
        logits = logits.detach().nan_to_num()

        def loss_of(rows: Rows, target: Tensor) -> Tensor:
            return self._call(logits if rows is None else logits[rows], target, 1)

        traits = find_traits(loss_of, labels, normalises=self._takes_count)
        # Autocast caches casts of the head's weights. Those made under no_grad would cut the gradients of the next pass.
        torch.clear_autocast_cache()
        return traits

    def count(self, labels: Tensor) -> int | Tensor:
        """Return the number of targets of a micro-batch; a tensor only if the labels are on an accelerator."""
        if self._num_targets is None:
            return (self._traits or Traits()).num_targets(labels)
        number = self._num_targets(labels)
        return int(number) if not isinstance(number, Tensor) or number.device.type == "cpu" else number

    def mean(self, total: Tensor, count: int | Tensor) -> Tensor:
        """Return the mean over the targets of a batch; `total` is its share in a step of only this batch."""
        is_sum = self._traits is not None and self._traits.is_sum
        return total / _at_least_one(count) if is_sum else total

    def share(
        self, logits: Tensor, labels: Tensor, count: int | Tensor, total: int | Tensor, num_micro_batches: int
    ) -> Tensor:
        """Return the share of this micro-batch in the loss of its step; the shares of a step add up to its loss."""
        if self._sum_over_targets is not None:
            if num_micro_batches == 1 and isinstance(total, int) and count == total > 0:
                mean: Tensor = self._sum_over_targets(logits, labels, "mean")
                return mean
            # The sum over targets needs only one division, by the targets of the step or of the micro-batch.
            divisor = _at_least_one(total) if self._token_weighted else _at_least_one(count) * num_micro_batches
            total_loss: Tensor = self._sum_over_targets(logits, labels)
            return total_loss / divisor
        if isinstance(count, int) and count == 0:
            # A mean over no targets is NaN, and its gradients are NaN too.
            return self.nothing(logits)
        share = self._weighted(logits, labels, count, total, num_micro_batches)
        if isinstance(count, int):
            return share
        # A count on an accelerator: select there, because reading it would make the host wait for the device.
        return torch.where(count > 0, share, self.nothing(logits).to(share.dtype))

    def logits(self, logits: Tensor) -> Tensor:
        """Return the logits; apply the head if the loss is computed from hidden states."""
        made: Tensor = logits if self._head is None else self._head(logits)
        return made

    def nothing(self, logits: Tensor) -> Tensor:
        """Return a zero that depends on everything the loss depends on, so that backward gives zero gradients."""
        # A constant zero would leave parameters without gradients, and other ranks wait for the all-reduce of each one.
        if self._head is None:
            return logits.sum() * 0.0
        # One position reaches all parameters of the head; full logits would take the memory that fusing saves.
        zero: Tensor = self._head(logits[..., :1, :]).sum() * 0.0
        return zero + logits.sum() * 0.0

    def _weighted(
        self, logits: Tensor, labels: Tensor, count: int | Tensor, total: int | Tensor, num_micro_batches: int
    ) -> Tensor:
        if not self._token_weighted:
            return self._call(logits, labels, count) / num_micro_batches
        loss = self._call(logits, labels, total)
        # Already the share: the function divided by `total` itself, or this micro-batch has all targets of the step.
        if self._takes_count or count is total or (isinstance(total, int) and count == total):
            return loss
        if self._traits is not None and self._traits.is_sum:
            return loss
        # From a mean over the targets of this micro-batch to its part of the mean over the step.
        return loss * (count / _at_least_one(total))

    def _call(self, logits: Tensor, labels: Tensor, num_items: int | Tensor) -> Tensor:
        if self._takes_count:
            return self.loss_fn(logits, labels, num_items_in_batch=_at_least_one(num_items))  # type: ignore[call-arg]
        return self.loss_fn(logits, labels)


def zero_without_targets(loss: Tensor, count: Tensor, logits: Tensor | None) -> Tensor:
    """Return the loss, or zero if `count` is zero; selects on the device, so that the host does not wait for it."""
    zero = torch.zeros_like(loss) if logits is None else (logits.sum() * 0.0).to(loss.dtype)
    return torch.where(count > 0, loss, zero)


def _at_least_one(number: int | Tensor) -> int | Tensor:
    return max(number, 1) if isinstance(number, int) else number.clamp(min=1)


def parameters_of(function: Any) -> Mapping[str, Any]:
    """Return the parameters of a callable by name; empty if it has no signature."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        # Some callables written in C have no signature. They are treated as plain functions of (logits, labels).
        return {}
