"""Label smoothing of a model's own loss: the smoothed cross-entropy of its logits instead of the loss it returns.

The model still gets the labels, since encoder-decoder models derive their inputs from them. The first batch shows whether
the own loss is a cross-entropy of the logits; any other loss is refused. `ModelLoss` calls it.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from forgather.ml.loss.causal_loss import at_least_float32
from forgather.ml.trainer.step_loss.loss_traits import IGNORE_INDEX, Traits
from forgather.ml.trainer.step_loss.own_loss import TOLERANCE


class SmoothedOwnLoss:
    """Mean smoothed cross-entropy of a model's logits, which replaces the loss that the model returns."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._is_checked = False

    def of(self, model: nn.Module, logits: Tensor | None, labels: object, own: Tensor, traits: Traits) -> Tensor:
        """Return the smoothed loss of a batch; raise ValueError if the model's own loss is no cross-entropy."""
        if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dtype == torch.bool:
            raise self._refusal(model, "it is not computed from class labels")
        if logits is None or logits.shape[:-1] != labels.shape:
            raise self._refusal(model, "it has no logits with one row for each label")
        if traits.unit != "targets" or traits.is_sum:
            raise self._refusal(model, "it is not a mean over its targets")
        targets = labels.to(logits.device, torch.int64)
        if not traits.first_counts and labels.ndim > 1:
            targets = functional.pad(targets, (0, 1), value=IGNORE_INDEX)[..., 1:]
        scores = logits.to(at_least_float32(logits.dtype)).flatten(0, -2)
        if not self._is_checked:
            self._check(model, own, functional.cross_entropy(scores, targets.flatten(), ignore_index=IGNORE_INDEX))
        return functional.cross_entropy(
            scores, targets.flatten(), ignore_index=IGNORE_INDEX, label_smoothing=self._factor
        )

    def _check(self, model: nn.Module, own: Tensor, expected: Tensor) -> None:
        # This waits for the device, once per run.
        values = float(own.detach()), float(expected.detach())
        if not all(map(math.isfinite, values)):
            return
        # A small part of another kind, such as the load balancing of experts, would be lost without a message.
        if abs(values[0] - values[1]) > max(TOLERANCE, torch.finfo(own.dtype).eps) * max(map(abs, values)):
            raise self._refusal(model, f"it is {values[0]:.6g}, but the cross-entropy of the logits is {values[1]:.6g}")
        self._is_checked = True

    def _refusal(self, model: nn.Module, reason: str) -> ValueError:
        return ValueError(
            f"label_smoothing_factor={self._factor} needs a cross-entropy loss, but the own loss of {type(model).__name__} "
            f"is another one: {reason}. Set label_smoothing_factor=0, or pass compute_loss_func with the loss that you mean."
        )
