"""Repeated layers of a model: where they are, and torch.compile of each layer in place.

The pipeline splitter, selective activation checkpointing and `torch_compile_scope="layer"` find layers with these
functions.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from forgather.ml.trainer.step_loss.token_weighting import parameters_of

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def repeated_layers(model: nn.Module, setting: str) -> list[nn.Module]:
    """Return the repeated layers of a model or of a pipeline stage; raise ValueError if there are none.

    A model shows its layers in one of three ways: a container `layer_stack`, as in the pipeline protocol;
    `_no_split_modules`, the class names of layers, as in transformers; or a single ModuleList with
    `config.num_hidden_layers` entries. `setting` needs the layers, and is part of the error.
    """
    stack = getattr(model, "layer_stack", None)
    if isinstance(stack, _CONTAINERS):
        # A stack may contain the same layer several times.
        return list({id(layer): layer for layer in stack.children()}.values())
    layers = _layers_by_class(model, getattr(model, "_no_split_modules", None) or ()) or _layers_by_number(model)
    if not layers:
        raise ValueError(
            f"{setting} works on the repeated layers of a model, but {type(model).__name__} shows none. It has no container "
            "layer_stack, no _no_split_modules with the class names of its layers, and no single ModuleList of "
            "config.num_hidden_layers. Name the ModuleList of the layers layer_stack, or set _no_split_modules = "
            "['ClassOfALayer'] in the class of the model."
        )
    return layers


def layer_lists(model: nn.Module, length: int | None) -> list[str]:
    """Return the FQNs of all ModuleLists with this number of entries."""
    return [
        path for path, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) == length
    ]


def compile_layers(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Compile each layer in place: names of parameters stay, and layers with the same code share one graph."""
    layers = repeated_layers(model, "torch_compile_scope='layer'")
    # Each layer reads a cache with its own index, which is a constant of the graph: every layer would be compiled.
    avoid_cache(model)
    for layer in layers:
        layer.compile(**options)


def avoid_cache(model: nn.Module) -> None:
    """Let forward passes of a Hugging Face model build no KV cache, unless the caller asks for one, as generation does."""
    if "use_cache" in parameters_of(model.forward) and _no_cache not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_no_cache, with_kwargs=True)


def _no_cache(module: nn.Module, args: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, keywords if keywords.get("past_key_values") is not None else {"use_cache": False, **keywords}


def _layers_by_class(model: nn.Module, names: Any) -> list[nn.Module]:
    # Some models list more than layers, such as embeddings. Only entries of containers repeat.
    return [
        child
        for module in model.modules()
        if isinstance(module, _CONTAINERS)
        for child in module.children()
        if type(child).__name__ in names
    ]


def _layers_by_number(model: nn.Module) -> list[nn.Module]:
    config: Any = getattr(model, "config", None)
    length = getattr(config, "num_hidden_layers", None)
    lists = layer_lists(model, length) if length else []
    return list(model.get_submodule(lists[0]).children()) if len(lists) == 1 else []
