"""Cross entropy of the next token."""

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

_FEW = 1024


class NextTokenLoss:
    """What all losses of the next token share: which labels are targets, how many there are, and the mean over them.

    Labels are `[..., sequence]`, each the target of the position before it; labels of `ignore_index` are no targets.
    Without any target the loss is 0, and so are the gradients. With `compile=True` the cross entropy runs through
    `torch.compile`.
    """

    def __init__(self, ignore_index: int = -100, *, compile: bool = False) -> None:
        self.ignore_index = ignore_index
        self.compile = compile

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        count = self.num_targets(labels)
        # On the device the count stays a tensor, since reading it would wait for it.
        divisor = max(count, 1) if isinstance(count, int) else count.to(outputs.device).clamp(min=1)
        return self.sum_over_targets(outputs, labels) / divisor

    def sum_over_targets(self, outputs: Tensor, labels: Tensor, reduction: str = "sum") -> Tensor:
        """The sum instead of the mean, for those who know how many targets it is over.

        With `reduction="mean"` it is the mean after all, but NaN when there is no target.
        """
        raise NotImplementedError

    def num_targets(self, labels: Tensor) -> int | Tensor:
        """How many targets the mean is over; a tensor where the labels are on a device."""
        if labels.device.type != "cpu":
            number: Tensor = (labels[..., 1:] != self.ignore_index).sum()
            return number
        if labels.ndim == 2 and labels.numel() <= _FEW:
            # Right after a step the code of numpy and torch is not in the caches: it would take longer to fetch than this.
            targets = (row[1:] for row in labels.tolist())
            return sum(len(row) - int(row.count(self.ignore_index)) for row in targets)
        return int(np.count_nonzero(labels.numpy()[..., 1:] != self.ignore_index))

    def targets(self, labels: Tensor, device: torch.device) -> Tensor:
        """The target of every position, in one row."""
        # Moving the labels rather than cutting the last outputs off saves a copy of the outputs.
        return functional.pad(labels, (0, 1), value=self.ignore_index)[..., 1:].to(device, torch.int64).flatten()


class CausalLoss(NextTokenLoss):
    """The mean cross entropy of each position's logits with the label of the next position.

    Logits are `[..., sequence, vocabulary]` and labels `[..., sequence]`; labels of `ignore_index` are no targets. Without
    any target the loss is 0, and so are the gradients. With `compile=True` the cross entropy runs through `torch.compile`.
    """

    def sum_over_targets(self, logits: Tensor, labels: Tensor, reduction: str = "sum") -> Tensor:
        cross_entropy = _compiled_cross_entropy() if self.compile else _cross_entropy
        return cross_entropy(logits, self.targets(labels, logits.device), self.ignore_index, reduction)


def _cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int, reduction: str) -> Tensor:
    scores = logits.to(at_least_float32(logits.dtype)).flatten(0, -2)
    return functional.cross_entropy(scores, targets, ignore_index=ignore_index, reduction=reduction)


@cache
def _compiled_cross_entropy() -> Callable[[Tensor, Tensor, int, str], Tensor]:
    # One for all losses, and no attribute of a loss, which is copied and sent to other processes.
    return torch.compile(_cross_entropy)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The type that losses of values of this type are computed in."""
    return torch.promote_types(dtype, torch.float32)
