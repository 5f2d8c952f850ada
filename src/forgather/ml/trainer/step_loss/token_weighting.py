"""The loss of a step as one mean over all its target tokens, however the step is split into micro-batches and ranks."""

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
    """Gives a micro-batch its share of the step's loss.

    Three kinds of function are understood: one that takes `num_items_in_batch` and returns sum / num_items_in_batch; one
    that has `num_targets(labels)` (and maybe `sum_over_targets(logits, labels)`, which saves work); and a plain one
    that returns a mean over its targets. Of a plain one it is found out once, on real logits, what its mean is over and
    whether it is one: whether the first position of a sequence counts (causal losses shift), whether labels of -100 are
    left out, and whether it is a sum.
    """

    def __init__(self, loss_fn: LossFunctionT, token_weighted: bool = True, head: nn.Module | None = None) -> None:
        """With a `head` the loss function takes hidden states in place of logits, and uses the head's parameters."""
        self.loss_fn = loss_fn
        self._head = head
        self._token_weighted = token_weighted
        self._takes_count = "num_items_in_batch" in parameters_of(loss_fn)
        self._num_targets = getattr(loss_fn, "num_targets", None)
        self._sum_over_targets = getattr(loss_fn, "sum_over_targets", None)
        self._traits: Traits | None = None

    @property
    def is_resolved(self) -> bool:
        """Whether targets can be counted without having seen logits."""
        return self._num_targets is not None or self._traits is not None

    @property
    def needs_counts(self) -> bool:
        """Whether a share depends on the number of targets of its micro-batch."""
        return self._sum_over_targets is None

    @property
    def traits(self) -> Traits | None:
        """What was found out of a plain function; None if that was not yet, or need not be."""
        return self._traits

    def adopt(self, traits: Traits) -> None:
        """Take over what another rank has found out."""
        if self._traits is None and traits.is_sum:
            logger.warning(
                "The loss function returns a sum over its targets, and no mean. So the loss of a step is the sum over all its "
                "micro-batches and ranks, which grows with the batch; an evaluation reports the mean. To train on the mean, "
                "return one, or take num_items_in_batch and divide the sum by it."
            )
        self._traits = traits

    def resolve(self, logits: Tensor, labels: Tensor) -> None:
        """Find out which labels are targets, and what the loss is divided by."""
        self.adopt(self.found(logits, labels))

    def found(self, logits: Tensor, labels: Tensor) -> Traits:
        """What can be found out from the logits of a batch."""
        if logits.ndim > 0 and labels.ndim > 0 and len(logits) == len(labels):
            # Two samples tell as much as all of them, and take less memory.
            logits, labels = logits[:2], labels[:2]
        logits = logits.detach().nan_to_num()

        def loss_of(rows: Rows, target: Tensor) -> Tensor:
            return self._call(logits if rows is None else logits[rows], target, 1)

        traits = find_traits(loss_of, labels, normalises=self._takes_count)
        # Casts of a head's weights that were made without gradients would be used with them.
        torch.clear_autocast_cache()
        return traits

    def count(self, labels: Tensor) -> int | Tensor:
        """The number of targets in a micro-batch; a tensor only where labels live on a device already."""
        if self._num_targets is None:
            return (self._traits or Traits()).num_targets(labels)
        number = self._num_targets(labels)
        return int(number) if not isinstance(number, Tensor) or number.device.type == "cpu" else number

    def mean(self, total: Tensor, count: int | Tensor) -> Tensor:
        """The mean over the targets of a batch, whose share in a step of its own is `total`."""
        is_sum = self._traits is not None and self._traits.is_sum
        return total / _at_least_one(count) if is_sum else total

    def share(
        self, logits: Tensor, labels: Tensor, count: int | Tensor, total: int | Tensor, num_micro_batches: int
    ) -> Tensor:
        """The part of the step's loss that this micro-batch makes; the shares of a step add up to its loss."""
        if self._sum_over_targets is not None:
            if num_micro_batches == 1 and isinstance(total, int) and count == total > 0:
                mean: Tensor = self._sum_over_targets(logits, labels, "mean")
                return mean
            divisor = _at_least_one(total) if self._token_weighted else _at_least_one(count) * num_micro_batches
            total_loss: Tensor = self._sum_over_targets(logits, labels)
            return total_loss / divisor
        if isinstance(count, int) and count == 0:
            # A mean over nothing is NaN, and so would be its gradients.
            return self.nothing(logits)
        share = self._weighted(logits, labels, count, total, num_micro_batches)
        if isinstance(count, int):
            return share
        return torch.where(count > 0, share, self.nothing(logits).to(share.dtype))

    def logits(self, logits: Tensor) -> Tensor:
        """The logits themselves, also where the loss is computed from hidden states."""
        made: Tensor = logits if self._head is None else self._head(logits)
        return made

    def nothing(self, logits: Tensor) -> Tensor:
        """Zero, with gradients of zero for all that the loss depends on: other ranks wait for those of each parameter."""
        if self._head is None:
            return logits.sum() * 0.0
        zero: Tensor = self._head(logits[..., :1, :]).sum() * 0.0
        return zero + logits.sum() * 0.0

    def _weighted(
        self, logits: Tensor, labels: Tensor, count: int | Tensor, total: int | Tensor, num_micro_batches: int
    ) -> Tensor:
        if not self._token_weighted:
            return self._call(logits, labels, count) / num_micro_batches
        loss = self._call(logits, labels, total)
        if self._takes_count or count is total or (isinstance(total, int) and count == total):
            return loss
        if self._traits is not None and self._traits.is_sum:
            return loss
        return loss * (count / _at_least_one(total))

    def _call(self, logits: Tensor, labels: Tensor, num_items: int | Tensor) -> Tensor:
        if self._takes_count:
            return self.loss_fn(logits, labels, num_items_in_batch=_at_least_one(num_items))  # type: ignore[call-arg]
        return self.loss_fn(logits, labels)


def zero_without_targets(loss: Tensor, count: Tensor, logits: Tensor | None) -> Tensor:
    """The loss, or zero where the count on the device is: to look at it would mean to wait for the device."""
    zero = torch.zeros_like(loss) if logits is None else (logits.sum() * 0.0).to(loss.dtype)
    return torch.where(count > 0, loss, zero)


def _at_least_one(number: int | Tensor) -> int | Tensor:
    return max(number, 1) if isinstance(number, int) else number.clamp(min=1)


def parameters_of(function: Any) -> Mapping[str, Any]:
    """The parameters of a callable by name; none where it does not tell."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        # Some callables written in C have no signature; they are plain functions of (logits, labels).
        return {}
