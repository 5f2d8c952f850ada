"""Cross entropy of the next token from hidden states, without ever having all logits."""

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
"""Of each implementation that is not ours, what is imported and what is installed; the first that can is preferred."""


class LinearCrossEntropyLoss(LossInParts):
    """`CausalLoss` of the logits that `output_embeddings` would give for hidden states `[..., sequence, hidden]`.

    The logits must be nothing but a linear map of the hidden states, by the `weight` (and `bias`) of that module. Both are
    read at each call, so that they may be moved, loaded or tied in between.

    `impl` is "pytorch" (always there), "cce" (cut-cross-entropy), "liger", or "auto": on CUDA the first of "cce" and
    "liger" that is installed and can do it, else "pytorch".

    `chunk_size` is for "pytorch", which holds as many logits at a time as `chunk_size` entries of the vocabulary have for
    all tokens: of `num_tokens * chunk_size // vocabulary` tokens (at least one), with the whole vocabulary for each. They
    are in float32. The gradients are computed along with the loss, so that no logits are computed twice. `compile=True` is
    for "pytorch" too: the cross entropy of a chunk runs through `torch.compile`.
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
        """Which implementation such hidden states get: "cce", "liger" or "pytorch"."""
        has_bias = self._bias is not None
        if self.impl == "auto":
            able = (name for name in _PACKAGES if _why_not(name, hidden_states, has_bias) is None)
            return next(able, "pytorch")
        if self.impl != "pytorch" and (reason := _why_not(self.impl, hidden_states, has_bias)):
            raise ValueError(f"LinearCrossEntropyLoss(impl={self.impl!r}) {reason}. Use impl='pytorch' or 'auto'.")
        return self.impl

    def unfused(self) -> CausalLoss:
        """The same loss of logits, for those who cannot use this one."""
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
        if torch.is_grad_enabled():
            apply: Callable[..., Tensor] = _LinearCrossEntropy.apply
            return apply(*arguments)
        return linear_cross_entropy(*arguments)[0]

    def _tokens_at_a_time(self, num_tokens: int, vocabulary: int) -> int:
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
        # In place, for there shall be one tensor of the size of the weight; a second backward pass is refused since the
        # saved ones have changed. Sums are rounded to the dtype of the weight after that: before, float16 may overflow.
        hidden_states, weight, bias = (None if one is None else one.mul_(grad_output) for one in ctx.saved_tensors)
        weight, bias = (None if one is None else one.to(ctx.dtype) for one in (weight, bias))
        return hidden_states, weight, bias, None, None, None, None


class _Gradients:
    """The sums of those gradients that are needed; of weight and bias in float32 at least."""

    def __init__(self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None, needed: tuple[bool, ...]) -> None:
        dtype = at_least_float32(weight.dtype)
        self.hidden_states = torch.zeros_like(hidden_states) if needed[0] else None
        self.weight = torch.zeros_like(weight, dtype=dtype) if needed[1] else None
        self.bias = None if bias is None or not needed[2] else torch.zeros_like(bias, dtype=dtype)
        self.needed = any(needed)

    def add(self, rows: Rows, of_logits: Tensor, hidden_states: Tensor, weight: Tensor) -> None:
        """Add those of one part, whose hidden states are in the dtype of the weight."""
        if self.bias is not None:
            self.bias += of_logits.sum(dim=0)
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
    """The summed cross entropy of `[tokens, hidden]`, and the `needed` gradients of hidden states, weight and bias."""
    gradients = _Gradients(hidden_states, weight, bias, needed)
    hidden_states, weight, bias = _as_linear_takes_them(hidden_states, weight, bias)
    dtype = at_least_float32(weight.dtype)
    total = weight.new_zeros((), dtype=dtype)
    with torch.autocast(weight.device.type, enabled=False):
        for rows in parts:
            part = hidden_states[rows]
            scores = functional.linear(part, weight, bias).to(dtype)
            total += of_part(scores, targets[rows], ignore_index, gradients.needed)
            if gradients.needed:
                gradients.add(rows, scores, part, weight)
            # Else this part would still be there when the next one is made.
            del scores
    return total, gradients


def _as_linear_takes_them(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Hidden states, weight and bias in the dtype in which `nn.Linear` would multiply them, under autocast or not."""
    dtype = _dtype_of_product(hidden_states)
    return hidden_states.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _dtype_of_product(hidden_states: Tensor) -> torch.dtype:
    device = hidden_states.device.type
    # Autocast leaves float64 alone.
    if torch.is_autocast_enabled(device) and hidden_states.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return hidden_states.dtype


_ROWS_OF_PRODUCT = 4096


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
        return
    # The product has a dtype of its own: some rows at a time, so that it takes no memory to speak of.
    for sums, rows in zip(torch.split(total, _ROWS_OF_PRODUCT), torch.split(left, _ROWS_OF_PRODUCT), strict=True):
        sums += rows @ right


def _with_package(
    name: str, hidden_states: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ignore_index: int
) -> Tensor:
    # Cast here, since the packages differ in what they do under autocast.
    hidden_states, weight, bias = _as_linear_takes_them(hidden_states, weight, bias)
    function = _cce if name == "cce" else _liger
    with torch.autocast(hidden_states.device.type, enabled=False):
        return function(hidden_states, weight, bias, targets, ignore_index).to(at_least_float32(weight.dtype))


def _cce(hidden_states: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ignore_index: int) -> Tensor:
    # Old versions have no parameter of that name.
    with_bias = {} if bias is None else {"bias": bias}
    return _cce_function()(hidden_states, weight, targets, ignore_index=ignore_index, reduction="sum", **with_bias)


def _liger(hidden_states: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ignore_index: int) -> Tensor:
    # The module rather than the function below it, whose arguments and results differ between versions.
    module = import_module("liger_kernel.transformers.fused_linear_cross_entropy")
    kind = module.LigerFusedLinearCrossEntropyLoss
    # Else chunks of the weight's gradient are added up in its own dtype; old versions have no parameter of that name.
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
    """Why a package cannot compute the loss of these hidden states, as the end of a sentence."""
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
        return "takes no bias in the version that is installed, but the output embeddings have one"
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
            f"pip install {to_install}, or use impl='pytorch' (always there) or 'auto' (the best that is there)."
        )


def _require_linear(output_embeddings: nn.Module) -> None:
    name = type(output_embeddings).__name__
    weight = getattr(output_embeddings, "weight", None)
    if not isinstance(weight, Tensor):
        raise ValueError(
            f"LinearCrossEntropyLoss multiplies hidden states by output_embeddings.weight, but {name} has no weight: pass the "
            "linear layer that makes the logits, such as model.get_output_embeddings()."
        )
    if weight.ndim != 2:
        raise ValueError(
            f"LinearCrossEntropyLoss needs output embeddings with a weight of [vocabulary, hidden], but that of {name} is "
            f"{list(weight.shape)}: pass the linear layer that makes the logits, such as model.get_output_embeddings()."
        )


def _require_match(hidden_states: Tensor, weight: Tensor) -> None:
    if hidden_states.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"LinearCrossEntropyLoss got hidden states of width {hidden_states.shape[-1]}, but its output embeddings take "
            f"{weight.shape[1]} (their weight is {list(weight.shape)}): pass what the model gives to them, not logits."
        )
    if hidden_states.dtype != weight.dtype and not torch.is_autocast_enabled(hidden_states.device.type):
        raise ValueError(
            f"LinearCrossEntropyLoss got hidden states of {hidden_states.dtype}, but its output embeddings are {weight.dtype}: "
            "give the whole model one dtype, or compute the loss under autocast too (mixed_precision)."
        )
