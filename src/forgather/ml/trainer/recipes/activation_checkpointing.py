"""Activation checkpointing: which function enables it, and selective checkpointing of each layer.

Selective checkpointing keeps attention and narrow matrix products of a layer, and recomputes everything else in the
backward pass. Called for the model, or for each pipeline stage, before the optimizer is created.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from forgather.ml.trainer.arguments.minimal_arguments import MinimalTrainingArguments
from forgather.ml.trainer.setup.layers import avoid_cache, repeated_layers
from forgather.ml.trainer.setup.model_modes import enable_hf_activation_checkpointing
from forgather.ml.trainer.trainer_types import EnableCheckpointFnT

_aten = torch.ops.aten
_PRODUCTS: Mapping[object, int] = {
    _aten.mm.default: 1,
    _aten.addmm.default: 2,
    _aten._scaled_mm.default: 1,
    _aten._grouped_mm.default: 1,
}
"""Matrix products, and the position of the second factor. Batched products are left out: they compute the scores of
unfused attention, which grow with the square of the sequence length."""
_ATTENTION: Mapping[object, int] = {
    op: [argument.name for argument in op._schema.arguments].index("dropout_p")
    for op in (
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
        _aten._flash_attention_forward.default,
        _aten._efficient_attention_forward.default,
    )
}
"""Fused attention, and the position of its dropout rate."""
_CACHES = ("past_key_values", "past_key_value", "layer_past")


def checkpointing_function(
    args: MinimalTrainingArguments, enable_full: EnableCheckpointFnT | None
) -> EnableCheckpointFnT | None:
    """Return the function that `gradient_checkpointing` selects; None if it is off, or `enable_full` is None."""
    mode = args.gradient_checkpointing
    if mode is False or enable_full is None:
        return None
    if callable(mode):
        return mode
    return enable_selective_activation_checkpointing if mode == "selective" else enable_full


def require_one_function(args: MinimalTrainingArguments, enable_full: EnableCheckpointFnT | None) -> None:
    """Raise ValueError if the arguments and the trainer name different functions for activation checkpointing."""
    mode = args.gradient_checkpointing
    if isinstance(mode, bool) or mode == "full" or enable_full in (None, enable_hf_activation_checkpointing):
        return
    asked = "a function" if callable(mode) else repr(mode)
    raise ValueError(
        f"gradient_checkpointing is {asked}, but enable_activation_checkpoint_fn was passed to the trainer too: only one of "
        "them can select the activations. Remove enable_activation_checkpoint_fn, or set gradient_checkpointing=True to "
        "use it."
    )


def enable_selective_activation_checkpointing(rank: int, module: nn.Module) -> None:
    """Checkpoint each layer selectively: keep attention and narrow matrix products, recompute the rest."""
    layers = repeated_layers(module, "gradient_checkpointing='selective'")
    if getattr(module, "is_gradient_checkpointing", False):
        # Full checkpointing around these layers would recompute everything, also the kept results.
        module.gradient_checkpointing_disable()  # type: ignore[operator]
    avoid_cache(module)
    for layer in layers:
        # At a second `train`, the layers are already prepared.
        if not isinstance(vars(layer).get("forward"), SelectiveForward):
            vars(layer)["forward"] = SelectiveForward(layer)


class SelectiveForward:
    """Forward pass of a layer under selective checkpointing; an attribute of the layer, so that names do not change.

    A closure would run the original layer in a deep copy of the model. This object is copied together with its layer.
    """

    def __init__(self, layer: nn.Module) -> None:
        # `inspect.signature` follows this attribute: callers look up which keywords the layer accepts.
        self.__wrapped__ = layer.forward

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        # A recomputed layer would append its keys and values to a cache a second time.
        if not torch.is_grad_enabled() or any(keywords.get(name) is not None for name in _CACHES):
            return self.__wrapped__(*args, **keywords)
        if args:
            return _checkpoint(functools.partial(self.__wrapped__, **keywords), *args)
        # PyTorch keeps the random state for the devices of positional arguments only.
        return _checkpoint(lambda given: self.__wrapped__(**given), keywords)


def _policy(context: object, op: object, *args: Any, **keywords: Any) -> CheckpointPolicy:
    """Return whether to keep the result of an operation for the backward pass."""
    keep = False
    if op in _PRODUCTS:
        # Results that are wider than their input, as in the first half of an MLP, need most of the memory of a layer.
        inner, width = args[_PRODUCTS[op]].shape[-2:]
        keep = bool(width <= inner)
    elif op in _ATTENTION:
        position = _ATTENTION[op]
        rate = args[position] if len(args) > position else keywords.get("dropout_p", 0.0)
        # A kept result draws no random numbers when the layer is recomputed, so later dropout would change its mask.
        keep = rate == 0.0
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


_checkpoint = functools.partial(
    checkpoint, use_reentrant=False, context_fn=functools.partial(create_selective_checkpoint_contexts, _policy)
)
