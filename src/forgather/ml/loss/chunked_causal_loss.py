"""Cross entropy of the next token, a part of the tokens at a time."""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from forgather.ml.loss.causal_loss import NextTokenLoss, at_least_float32

Rows = slice | Tensor
"""What chooses the tokens of one part."""
PartLossT = Callable[[Tensor, Tensor, int, bool], Tensor]
"""`cross_entropy_in_place`, compiled or not."""


def cross_entropy_in_place(scores: Tensor, targets: Tensor, ignore_index: int, with_gradient: bool) -> Tensor:
    """The summed cross entropy of rows of logits, which are overwritten: by their gradient, if that is wanted."""
    ignored = (targets == ignore_index).unsqueeze(1)
    index = targets.unsqueeze(1).masked_fill(ignored, 0)
    scores.sub_(scores.amax(dim=1, keepdim=True))
    at_target = scores.gather(1, index)
    sums = scores.exp_().sum(dim=1, keepdim=True)
    losses = (sums.log() - at_target).masked_fill_(ignored, 0)
    if with_gradient:
        # Divided by infinity, ignored rows become zero without another pass over all logits.
        scores.div_(sums.masked_fill_(ignored, torch.inf))
        scores.scatter_add_(1, index, ignored.to(scores.dtype).sub_(1))
    return losses.sum()


class LossInParts(NextTokenLoss):
    """A loss that goes over its tokens part by part, and computes the gradients along with the loss."""

    def __init__(self, chunk_size: int, ignore_index: int, *, compile: bool = False) -> None:
        super().__init__(ignore_index, compile=compile)
        if chunk_size < 1:
            raise ValueError(
                f"chunk_size={chunk_size} of {type(self).__name__} leaves nothing to compute at a time: it must be at least 1."
            )
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
        """The sum over the tokens of one row."""
        raise NotImplementedError


class ChunkedCausalLoss(LossInParts):
    """`CausalLoss` with less memory: besides the logits and their gradient, only `chunk_size` tokens' logits exist at a time.

    Those are in float32. The gradient is computed along with the loss, in the dtype of the logits. With `compile=True` the
    cross entropy of a chunk runs through `torch.compile`.
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
        gradient = torch.zeros_like(logits) if ctx.needs_input_grad[0] else None
        total = cross_entropy_in_parts(logits, targets, parts, ignore_index, gradient, of_part)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None, None]:
        refuse_second_derivative("ChunkedCausalLoss")
        (gradient,) = ctx.saved_tensors
        # In place, for there shall be one such tensor; a second backward pass is refused since the saved one has changed.
        return gradient.mul_(grad_output), None, None, None, None


def refuse_second_derivative(name: str) -> None:
    """In a backward pass: gradients that were computed with the loss are constants, whose own would be zero."""
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
    """The summed cross entropy of `[tokens, vocabulary]`, whose gradient is written to `gradient`."""
    dtype = at_least_float32(logits.dtype)
    total = logits.new_zeros((), dtype=dtype)
    for rows in parts:
        # Rows that are listed are a copy already; a slice is not, and the logits are not ours to change.
        scores = logits[rows].to(dtype, copy=isinstance(rows, slice))
        total += of_part(scores, targets[rows], ignore_index, gradient is not None)
        if gradient is not None:
            gradient[rows] = scores.to(gradient.dtype)
        # Else this part would still be there when the next one is made.
        del scores
    return total


def parts_of(targets: Tensor, ignore_index: int, size: int) -> list[Rows]:
    """The tokens in parts of `size`; on the CPU only those with a target, which on a device would have to be waited for."""
    if targets.device.type != "cpu":
        return [slice(start, start + size) for start in range(0, len(targets), size)]
    return list(torch.split((targets != ignore_index).nonzero().flatten(), size))


def part_loss(compile: bool) -> PartLossT:
    """`cross_entropy_in_place`, through `torch.compile` if that is asked for."""
    return _compiled_cross_entropy() if compile else cross_entropy_in_place


@cache
def _compiled_cross_entropy() -> PartLossT:
    return torch.compile(cross_entropy_in_place)
