"""Chunked cross-entropy of the next token: logits are processed a few tokens at a time to save memory.

The gradient is computed in the forward pass, while the chunk is in memory. `linear_cross_entropy` builds on the
functions of this module.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from forgather.ml.loss.causal_loss import NextTokenLoss, at_least_float32

Rows = slice | Tensor
"""Index that selects the tokens of one chunk."""
PartLossT = Callable[[Tensor, Tensor, int, bool], Tensor]
"""`cross_entropy_in_place`, compiled or not."""


def cross_entropy_in_place(scores: Tensor, targets: Tensor, ignore_index: int, with_gradient: bool) -> Tensor:
    """Return the summed cross-entropy of rows of logits; overwrite the rows, with their gradient if `with_gradient`."""
    ignored = (targets == ignore_index).unsqueeze(1)
    # `gather` rejects negative indices such as -100.
    index = targets.unsqueeze(1).masked_fill(ignored, 0)
    # Subtracting the maximum keeps exp from overflowing.
    scores.sub_(scores.amax(dim=1, keepdim=True))
    at_target = scores.gather(1, index)
    sums = scores.exp_().sum(dim=1, keepdim=True)
    losses = (sums.log() - at_target).masked_fill_(ignored, 0)
    if with_gradient:
        # Dividing by infinity zeroes ignored rows without another pass over all logits.
        scores.div_(sums.masked_fill_(ignored, torch.inf))
        # The gradient is softmax minus one-hot. Ignored rows get 1 - 1 = 0 at their placeholder index.
        scores.scatter_add_(1, index, ignored.to(scores.dtype).sub_(1))
    return losses.sum()


class LossInParts(NextTokenLoss):
    """Base class of losses that process their tokens in chunks and compute gradients together with the loss."""

    def __init__(self, chunk_size: int, ignore_index: int, *, compile: bool = False) -> None:
        super().__init__(ignore_index, compile=compile)
        if chunk_size < 1:
            raise ValueError(f"chunk_size={chunk_size} of {type(self).__name__} cannot be used: it must be at least 1.")
        self.chunk_size = chunk_size

    def sum_over_targets(self, outputs: Tensor, labels: Tensor, reduction: str = "sum") -> Tensor:
        if reduction not in ("sum", "mean"):
            raise ValueError(f"reduction={reduction!r} is unknown to {type(self).__name__}: use 'sum' or 'mean'.")
        if outputs.shape[:-1] != labels.shape:
            raise ValueError(
                f"{type(self).__name__} got {list(outputs.shape[:-1])} positions (with {outputs.shape[-1]} values each) but "
                f"{list(labels.shape)} labels: there must be one label for each position."
            )
        targets = self.targets(labels, outputs.device)
        total = self._sum(outputs.flatten(0, -2), targets)
        return total if reduction == "sum" else total / (targets != self.ignore_index).sum()

    def _sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum over flattened tokens."""
        raise NotImplementedError


class ChunkedCausalLoss(LossInParts):
    """`CausalLoss` with less memory: only `chunk_size` tokens have float32 logits at a time.

    The logits themselves and their gradient exist as well, both in the dtype of the logits. The gradient is computed
    together with the loss. With `compile=True` the cross-entropy of a chunk runs through `torch.compile`.
    """

    def __init__(self, chunk_size: int = 256, ignore_index: int = -100, *, compile: bool = False) -> None:
        super().__init__(chunk_size, ignore_index, compile=compile)

    def _sum(self, logits: Tensor, targets: Tensor) -> Tensor:
        parts = parts_of(targets, self.ignore_index, self.chunk_size)
        of_part = part_loss(self.compile)
        if torch.is_grad_enabled():
            apply: Callable[..., Tensor] = _CrossEntropyInParts.apply
            return apply(logits, targets, parts, self.ignore_index, of_part)
        return cross_entropy_in_parts(logits, targets, parts, self.ignore_index, of_part=of_part)


class _CrossEntropyInParts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        parts: Iterable[Rows],
        ignore_index: int,
        of_part: PartLossT = cross_entropy_in_place,
    ) -> Tensor:
        # Rows of ignored tokens may be missing from `parts`, so their gradient must start at zero.
        gradient = torch.zeros_like(logits) if ctx.needs_input_grad[0] else None
        total = cross_entropy_in_parts(logits, targets, parts, ignore_index, gradient, of_part)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None, None]:
        refuse_second_derivative("ChunkedCausalLoss")
        (gradient,) = ctx.saved_tensors
        # In place, so that only one tensor of this size exists. Autograd rejects a second backward pass, because the
        # saved tensor has changed.
        return gradient.mul_(grad_output), None, None, None, None


def refuse_second_derivative(name: str) -> None:
    """Raise RuntimeError in a backward pass with create_graph=True.

    Gradients that were computed with the loss are constants for autograd: their derivative would silently be zero.
    """
    # Autograd enables gradients inside a backward pass only with create_graph=True.
    if torch.is_grad_enabled():
        raise RuntimeError(f"{name} has no second derivative (create_graph=True): use CausalLoss.")


def cross_entropy_in_parts(
    logits: Tensor,
    targets: Tensor,
    parts: Iterable[Rows],
    ignore_index: int,
    gradient: Tensor | None = None,
    of_part: PartLossT = cross_entropy_in_place,
) -> Tensor:
    """Return the summed cross-entropy of logits `[tokens, vocabulary]`; write their gradient to `gradient` if given."""
    dtype = at_least_float32(logits.dtype)
    total = logits.new_zeros((), dtype=dtype)
    for rows in parts:
        # Indexing with a tensor copies already. A slice is a view, and the caller's logits must not be overwritten.
        scores = logits[rows].to(dtype, copy=isinstance(rows, slice))
        total += of_part(scores, targets[rows], ignore_index, gradient is not None)
        if gradient is not None:
            gradient[rows] = scores.to(gradient.dtype)
        # Free this chunk before the next one is allocated.
        del scores
    return total


def parts_of(targets: Tensor, ignore_index: int, size: int) -> list[Rows]:
    """Split the tokens into chunks of `size`; on the CPU only tokens with a target."""
    # On an accelerator, `nonzero` would wait for the device.
    if targets.device.type != "cpu":
        return [slice(start, start + size) for start in range(0, len(targets), size)]
    return list(torch.split((targets != ignore_index).nonzero().flatten(), size))


def part_loss(compile: bool) -> PartLossT:
    """Return `cross_entropy_in_place`, compiled if `compile`."""
    return _compiled_cross_entropy() if compile else cross_entropy_in_place


@cache
def _compiled_cross_entropy() -> PartLossT:
    return torch.compile(cross_entropy_in_place)
