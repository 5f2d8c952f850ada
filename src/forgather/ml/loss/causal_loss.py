"""Cross-entropy of the next token: `CausalLoss`, and the base class of all next-token losses.

The loss is a mean over targets. `num_targets` and `sum_over_targets` let trainers weight micro-batches and ranks by
their number of targets.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

_FEW = 1024


class NextTokenLoss:
    """Base class of next-token losses: selection and count of targets, and the mean over them.

    Labels are `[..., sequence]`, each the target of the position before it; labels equal to `ignore_index` are no
    targets. Without any target the loss and the gradients are 0. With `compile=True` the cross-entropy runs through
    `torch.compile`.
    """

    def __init__(self, ignore_index: int = -100, *, compile: bool = False) -> None:
        self.ignore_index = ignore_index
        self.compile = compile

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        count = self.num_targets(labels)
        # On an accelerator the count stays a tensor: reading its value would synchronise with the device.
        divisor = max(count, 1) if isinstance(count, int) else count.to(outputs.device).clamp(min=1)
        return self.sum_over_targets(outputs, labels) / divisor

    def sum_over_targets(self, outputs: Tensor, labels: Tensor, reduction: str = "sum") -> Tensor:
        """Return the sum over the targets, for callers that know the total number of targets.

        `reduction="mean"` returns the mean, which is NaN if there is no target.
        """
        raise NotImplementedError

    def num_targets(self, labels: Tensor) -> int | Tensor:
        """Return the number of targets that the mean is over; a tensor if the labels are on an accelerator."""
        if labels.device.type != "cpu":
            number: Tensor = (labels[..., 1:] != self.ignore_index).sum()
            return number
        if labels.ndim == 2 and labels.numel() <= _FEW:
            # After a training step the code of numpy and torch is out of the CPU caches. For few labels plain Python is
            # faster than fetching that code.
            targets = (row[1:] for row in labels.tolist())
            return sum(len(row) - int(row.count(self.ignore_index)) for row in targets)
        return int(np.count_nonzero(labels.numpy()[..., 1:] != self.ignore_index))

    def targets(self, labels: Tensor, device: torch.device) -> Tensor:
        """Return the target of every position, flattened."""
        # Shift the labels, not the outputs: cutting off the last position would copy the logits.
        return functional.pad(labels, (0, 1), value=self.ignore_index)[..., 1:].to(device, torch.int64).flatten()


class CausalLoss(NextTokenLoss):
    """Mean cross-entropy of each position's logits with the label of the next position.

    Logits are `[..., sequence, vocabulary]` and labels `[..., sequence]`; labels equal to `ignore_index` are no
    targets. Without any target the loss and the gradients are 0. `label_smoothing` spreads this part of the target
    probability over all classes. With `compile=True` the cross-entropy runs through `torch.compile`.
    """

    def __init__(self, ignore_index: int = -100, *, compile: bool = False, label_smoothing: float = 0.0) -> None:
        super().__init__(ignore_index, compile=compile)
        self.label_smoothing = label_smoothing

    def sum_over_targets(self, logits: Tensor, labels: Tensor, reduction: str = "sum") -> Tensor:
        cross_entropy = _compiled_cross_entropy() if self.compile else _cross_entropy
        targets = self.targets(labels, logits.device)
        return cross_entropy(logits, targets, self.ignore_index, reduction, self.label_smoothing)


def _cross_entropy(
    logits: Tensor, targets: Tensor, ignore_index: int, reduction: str, label_smoothing: float
) -> Tensor:
    # The sum of exponentials over a large vocabulary loses too much precision in bfloat16.
    scores = logits.to(at_least_float32(logits.dtype)).flatten(0, -2)
    return functional.cross_entropy(
        scores, targets, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )


@cache
def _compiled_cross_entropy() -> Callable[[Tensor, Tensor, int, str, float], Tensor]:
    # A module-level cache and not an attribute: losses are copied and sent to other processes, compiled functions are
    # not.
    return torch.compile(_cross_entropy)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for computing losses of values of this dtype: float32, or wider."""
    return torch.promote_types(dtype, torch.float32)
