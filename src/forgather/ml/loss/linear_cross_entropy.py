"""Fused linear cross-entropy: next-token loss from hidden states, without materialising the full logits tensor.

Implementations: chunked PyTorch (always available), cut-cross-entropy and Liger kernels. Trainers create the loss
through `fused_loss_factory`, with the output layer of the model.
"""

import inspect
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from forgather.ml.loss.causal_loss import CausalLoss, at_least_float32
from forgather.ml.loss.chunked_causal_loss import (
    LossInParts,
    PartLossT,
    Rows,
    cross_entropy_in_place,
    part_loss,
    parts_of,
    refuse_second_derivative,
)

_PACKAGES = {"cce": ("cut_cross_entropy", "cut-cross-entropy"), "liger": ("liger_kernel", "liger-kernel")}
"""Third-party implementations: names for `import` and for pip, in order of preference."""


class LinearCrossEntropyLoss(LossInParts):
    """`CausalLoss` of the logits that `output_embeddings` would compute from hidden states `[..., sequence, hidden]`.

    The logits must be a plain linear map of the hidden states by the `weight` (and `bias`) of that module. Both are
    read at each call, so that they may be moved, loaded or tied in between.

    `impl` is "pytorch" (always available), "cce" (cut-cross-entropy), "liger", or "auto". On CUDA, "auto" takes the
    first of "cce" and "liger" that is installed and supports the input; otherwise it takes "pytorch".

    `chunk_size` is for "pytorch". At a time it holds the logits of `num_tokens * chunk_size // vocabulary` tokens (at
    least one) over the full vocabulary, in float32: as many values as `chunk_size` vocabulary entries have for all
    tokens. The gradients are computed together with the loss, so that no logits are computed twice. `compile=True` is
    for "pytorch" too: the cross-entropy of a chunk runs through `torch.compile`.
    """

    def __init__(
        self,
        output_embeddings: nn.Module,
        impl: str = "auto",
        chunk_size: int = 4096,
        ignore_index: int = -100,
        *,
        compile: bool = False,
    ) -> None:
        super().__init__(chunk_size, ignore_index, compile=compile)
        _require_linear(output_embeddings)
        _require_available(impl)
        self.output_embeddings = output_embeddings
        self.impl = impl

    def implementation_for(self, hidden_states: Tensor) -> str:
        """Return the implementation for such hidden states: "cce", "liger" or "pytorch"."""
        has_bias = self._bias is not None
        if self.impl == "auto":
            able = (name for name in _PACKAGES if _why_not(name, hidden_states, has_bias) is None)
            return next(able, "pytorch")
        if self.impl != "pytorch" and (reason := _why_not(self.impl, hidden_states, has_bias)):
            raise ValueError(f"LinearCrossEntropyLoss(impl={self.impl!r}) {reason}. Use impl='pytorch' or 'auto'.")
        return self.impl

    def unfused(self) -> CausalLoss:
        """Return the same loss as a function of logits, for callers that cannot use the fused loss."""
        return CausalLoss(self.ignore_index, compile=self.compile)

    @property
    def _weight(self) -> Tensor:
        return self.output_embeddings.weight  # type: ignore[return-value]

    @property
    def _bias(self) -> Tensor | None:
        return getattr(self.output_embeddings, "bias", None)

    def _sum(self, hidden_states: Tensor, targets: Tensor) -> Tensor:
        weight, bias = self._weight, self._bias
        _require_match(hidden_states, weight)
        implementation = self.implementation_for(hidden_states)
        if implementation != "pytorch":
            return _with_package(implementation, hidden_states, weight, bias, targets, self.ignore_index)
        parts = parts_of(targets, self.ignore_index, self._tokens_at_a_time(len(targets), len(weight)))
        arguments = (hidden_states, weight, bias, targets, parts, self.ignore_index, part_loss(self.compile))
        # Without autograd, no gradients are allocated or computed.
        if torch.is_grad_enabled():
            apply: Callable[..., Tensor] = _LinearCrossEntropy.apply
            return apply(*arguments)
        return linear_cross_entropy(*arguments)[0]

    def _tokens_at_a_time(self, num_tokens: int, vocabulary: int) -> int:
        # Chunks are slices of tokens, not of the vocabulary, because a softmax needs full rows.
        return max(1, num_tokens * min(self.chunk_size, vocabulary) // vocabulary)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        parts: Iterable[Rows],
        ignore_index: int,
        of_part: PartLossT = cross_entropy_in_place,
    ) -> Tensor:
        needed = ctx.needs_input_grad[:3]
        total, gradients = linear_cross_entropy(
            hidden_states, weight, bias, targets, parts, ignore_index, of_part, needed
        )
        ctx.save_for_backward(gradients.hidden_states, gradients.weight, gradients.bias)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("LinearCrossEntropyLoss")
        # In place, so that only one tensor of the size of the weight exists. Autograd rejects a second backward pass,
        # because the saved tensors have changed. Sums are cast to the weight's dtype after scaling: float16 may
        # overflow before.
        hidden_states, weight, bias = (None if one is None else one.mul_(grad_output) for one in ctx.saved_tensors)
        weight, bias = (None if one is None else one.to(ctx.dtype) for one in (weight, bias))
        return hidden_states, weight, bias, None, None, None, None


class _Gradients:
    """Accumulators of the needed gradients; float32 or wider for weight and bias."""

    def __init__(self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None, needed: tuple[bool, ...]) -> None:
        dtype = at_least_float32(weight.dtype)
        self.hidden_states = torch.zeros_like(hidden_states) if needed[0] else None
        self.weight = torch.zeros_like(weight, dtype=dtype) if needed[1] else None
        self.bias = None if bias is None or not needed[2] else torch.zeros_like(bias, dtype=dtype)
        self.needed = any(needed)

    def add(self, rows: Rows, of_logits: Tensor, hidden_states: Tensor, weight: Tensor) -> None:
        """Add the gradients of one chunk, given its hidden states in the dtype of the weight."""
        if self.bias is not None:
            self.bias += of_logits.sum(dim=0)
        # Multiply in the weight's dtype, as the backward pass of nn.Linear does.
        of_logits = of_logits.to(weight.dtype)
        if self.hidden_states is not None:
            self.hidden_states[rows] = (of_logits @ weight).to(self.hidden_states.dtype)
        if self.weight is not None:
            _add_product(self.weight, of_logits.T, hidden_states)


def linear_cross_entropy(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    parts: Iterable[Rows],
    ignore_index: int,
    of_part: PartLossT,
    needed: tuple[bool, ...] = (False, False, False),
) -> tuple[Tensor, _Gradients]:
    """Return the summed cross-entropy of `[tokens, hidden]`, and the `needed` gradients.

    `needed` refers to hidden states, weight and bias.
    """
    gradients = _Gradients(hidden_states, weight, bias, needed)
    hidden_states, weight, bias = _as_linear_takes_them(hidden_states, weight, bias)
    dtype = at_least_float32(weight.dtype)
    total = weight.new_zeros((), dtype=dtype)
    # The operands have their final dtype already.
    with torch.autocast(weight.device.type, enabled=False):
        for rows in parts:
            part = hidden_states[rows]
            scores = functional.linear(part, weight, bias).to(dtype)
            total += of_part(scores, targets[rows], ignore_index, gradients.needed)
            if gradients.needed:
                gradients.add(rows, scores, part, weight)
            # Free this chunk before the next one is allocated.
            del scores
    return total, gradients


def _as_linear_takes_them(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast hidden states, weight and bias to the dtype that `nn.Linear` would multiply in; respects autocast."""
    dtype = _dtype_of_product(hidden_states)
    return hidden_states.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _dtype_of_product(hidden_states: Tensor) -> torch.dtype:
    device = hidden_states.device.type
    # Autocast does not cast float64.
    if torch.is_autocast_enabled(device) and hidden_states.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return hidden_states.dtype


_ROWS_OF_PRODUCT = 4096


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
        return
    # The product has another dtype than the sum. Compute a few rows at a time, so that the product takes little memory.
    for sums, rows in zip(torch.split(total, _ROWS_OF_PRODUCT), torch.split(left, _ROWS_OF_PRODUCT), strict=True):
        sums += rows @ right


def _with_package(
    name: str, hidden_states: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ignore_index: int
) -> Tensor:
    # Cast here, because the packages behave differently under autocast.
    hidden_states, weight, bias = _as_linear_takes_them(hidden_states, weight, bias)
    function = _cce if name == "cce" else _liger
    with torch.autocast(hidden_states.device.type, enabled=False):
        return function(hidden_states, weight, bias, targets, ignore_index).to(at_least_float32(weight.dtype))


def _cce(hidden_states: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ignore_index: int) -> Tensor:
    # Old versions have no `bias` parameter, so pass it only if there is one.
    with_bias = {} if bias is None else {"bias": bias}
    return _cce_function()(hidden_states, weight, targets, ignore_index=ignore_index, reduction="sum", **with_bias)


def _liger(hidden_states: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ignore_index: int) -> Tensor:
    # Use the module class: arguments and results of the function below it differ between versions.
    module = import_module("liger_kernel.transformers.fused_linear_cross_entropy")
    kind = module.LigerFusedLinearCrossEntropyLoss
    # Without accum_dtype, Liger accumulates the weight's gradient in the weight's dtype. Old versions do not have it.
    precise = {"accum_dtype": torch.float32} if "accum_dtype" in inspect.signature(kind).parameters else {}
    loss = kind(ignore_index=ignore_index, reduction="sum", **precise)
    total: Tensor = loss(weight, hidden_states, targets, bias)
    return total


@cache
def _is_installed(package: str) -> bool:
    return find_spec(package) is not None


@cache
def _cce_function() -> Callable[..., Tensor]:
    function: Callable[..., Tensor] = import_module("cut_cross_entropy").linear_cross_entropy
    return function


def _why_not(name: str, hidden_states: Tensor, has_bias: bool) -> str | None:
    """Return why a package cannot compute the loss of these hidden states, as the end of a sentence; None if it can."""
    package, to_install = _PACKAGES[name]
    if hidden_states.device.type != "cuda":
        return f"runs on CUDA only, but the hidden states are on {hidden_states.device.type!r}"
    if not _is_installed(package):
        return f"needs the package {to_install}, which is not installed"
    return _why_not_cce(hidden_states, has_bias) if name == "cce" else None


def _why_not_cce(hidden_states: Tensor, has_bias: bool) -> str | None:
    dtype = _dtype_of_product(hidden_states)
    if dtype not in (torch.bfloat16, torch.float16):
        return f"computes gradients in bfloat16 and float16 only, but the hidden states are {dtype} (without autocast)"
    if torch.cuda.get_device_capability(hidden_states.device) < (8, 0):
        return "needs a GPU of compute capability 8.0 or more"
    if has_bias and "bias" not in inspect.signature(_cce_function()).parameters:
        return "takes no bias in the installed version, but the output embeddings have one"
    return None


def _require_available(impl: str) -> None:
    if impl in ("auto", "pytorch"):
        return
    if impl not in _PACKAGES:
        raise ValueError(
            f"impl={impl!r} of LinearCrossEntropyLoss is unknown: use 'auto', 'cce', 'liger' or 'pytorch'."
        )
    package, to_install = _PACKAGES[impl]
    if not _is_installed(package):
        raise ValueError(
            f"LinearCrossEntropyLoss(impl={impl!r}) needs the package {to_install}, which is not installed: "
            f"pip install {to_install}, or use impl='pytorch' (always available) or 'auto' (the best available)."
        )


def _require_linear(output_embeddings: nn.Module) -> None:
    name = type(output_embeddings).__name__
    weight = getattr(output_embeddings, "weight", None)
    if not isinstance(weight, Tensor):
        raise ValueError(
            f"LinearCrossEntropyLoss multiplies hidden states by output_embeddings.weight, but {name} has no weight. Pass "
            "the linear layer that computes the logits, such as model.get_output_embeddings()."
        )
    if weight.ndim != 2:
        raise ValueError(
            f"LinearCrossEntropyLoss needs a weight of shape [vocabulary, hidden], but the weight of {name} has shape "
            f"{list(weight.shape)}. Pass the linear layer that computes the logits, such as model.get_output_embeddings()."
        )


def _require_match(hidden_states: Tensor, weight: Tensor) -> None:
    if hidden_states.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"LinearCrossEntropyLoss got hidden states of width {hidden_states.shape[-1]}, but its output embeddings take "
            f"{weight.shape[1]} (their weight is {list(weight.shape)}). Pass the input of the output layer, not logits."
        )
    if hidden_states.dtype != weight.dtype and not torch.is_autocast_enabled(hidden_states.device.type):
        raise ValueError(
            f"LinearCrossEntropyLoss got hidden states of {hidden_states.dtype}, but its output embeddings are {weight.dtype}. "
            "Use one dtype for the full model, or compute the loss under autocast too (mixed_precision)."
        )
