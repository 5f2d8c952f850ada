"""fully_shard of a model, layer by layer, and initialisation of its shards.

The model is built on the meta device with a record of its initialisation (`deferred_init`), sharded, and then filled
tensor by tensor. A rank holds its shards and one full tensor at a time, never the full model. `FSDP2Trainer` calls this.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from forgather.ml.checkpoint.sharding.sharded_tensors import is_sharded, local_part, rows_of
from forgather.ml.construct import torch_dtype
from forgather.ml.trainer.fsdp2.fsdp2_arguments import FSDP2Arguments, FSDP2TrainingArguments
from forgather.ml.trainer.setup.layers import repeated_layers
from forgather.ml.trainer.setup.model_construction import missing_buffers
from forgather.ml.trainer.step_loss.fused import BASE_MODEL_METHOD

logger = logging.getLogger(__name__)

InitialValues = Mapping[str, Callable[[], Tensor]]
"""Functions that compute the initial value of a parameter or buffer, by FQN."""


def is_sharded_model(model: nn.Module | None) -> bool:
    """Return whether fully_shard was applied to a model."""
    return isinstance(model, FSDPModule)


def shard_model(model: nn.Module, mesh: DeviceMesh, args: FSDP2TrainingArguments, device: torch.device) -> None:
    """Apply fully_shard to each layer and then to the model, in place."""
    require_shardable(model)
    options = args.fsdp2
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": _precision(args),
        "offload_policy": _offload(options, device),
    }
    layers = _layers(model, options)
    _require_one_dtype(model, layers)
    for layer in layers:
        fully_shard(layer, reshard_after_forward=options.reshard_after_forward, **settings)
    # The backward pass begins with the parameters of the root, so gathering them again would gain nothing.
    fully_shard(model, reshard_after_forward=False, **settings)
    _register_base_model(model)


def _register_base_model(model: nn.Module) -> None:
    """Let fused losses run the base model of a Hugging Face model, without the head, with gathered parameters."""
    base = getattr(model, "base_model", None)
    if isinstance(base, nn.Module) and base is not model:
        setattr(model, BASE_MODEL_METHOD, lambda *args, **inputs: base(*args, **inputs))
        register_fsdp_forward_method(model, BASE_MODEL_METHOD)


def fill_shards(model: nn.Module, device: torch.device, values: InitialValues, will_be_loaded: bool) -> None:
    """Allocate the shards and buffers that are on the meta device, and compute their initial values.

    With `will_be_loaded`, only buffers that no checkpoint contains are computed.
    """
    on_meta = {name for name, tensor in _named_tensors(model).items() if tensor.is_meta}
    # One `_apply` for all modules: FSDP follows the new shards there. Tied parameters are one object, and stay tied.
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    wanted = on_meta & set(missing_buffers(model)) if will_be_loaded else on_meta
    with torch.no_grad():
        for name, tensor in _named_tensors(model).items():
            if name in wanted and name in values:
                _fill(tensor, values[name]())


def _fill(tensor: Tensor, value: Tensor) -> None:
    if is_sharded(tensor):
        local_part(tensor).copy_(rows_of(value, tensor))
    else:
        tensor.copy_(value)


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _layers(model: nn.Module, options: FSDP2Arguments) -> Sequence[nn.Module]:
    if not options.shard_transformer_layers:
        return []
    if options.transformer_layers_path is not None:
        return _layers_at(model, options.transformer_layers_path)
    try:
        return repeated_layers(model, "fsdp2.shard_transformer_layers=True")
    except ValueError:
        logger.warning(
            "%s shows no repeated layers, so its parameters are gathered all at once: each rank needs memory for the full "
            "model in every step. Set fsdp2.transformer_layers_path to the name of the module list with its layers.",
            type(model).__name__,
        )
        return []


def _layers_at(model: nn.Module, path: str) -> list[nn.Module]:
    try:
        layers = list(model.get_submodule(path).children())
    except AttributeError:
        layers = []
    if not layers:
        lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module)]
        raise ValueError(
            f"fsdp2.transformer_layers_path={path!r}: {type(model).__name__} has no module with layers of that name. Module "
            f"lists that it has: {', '.join(lists) or 'none'}."
        )
    return layers


def _precision(args: FSDP2TrainingArguments) -> MixedPrecisionPolicy:
    compute, reduce = (None if one is None else torch_dtype(one) for one in (args.compute_dtype, args.reduce_dtype))
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)


def _offload(options: FSDP2Arguments, device: torch.device) -> OffloadPolicy:
    return CPUOffloadPolicy(pin_memory=device.type != "cpu") if options.cpu_offload else OffloadPolicy()


def require_shardable(model: nn.Module) -> None:
    """Raise ValueError for parameters that fully_shard cannot divide by rows."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise ValueError(
                f"Parameter {name!r} is a scalar (shape []), and FSDP2 divides parameters by rows. Give it shape [1]."
            )
        if not parameter.is_contiguous():
            raise ValueError(
                f"Parameter {name!r} of shape {list(parameter.shape)} is not contiguous, and FSDP2 divides parameters by "
                "rows. Call .contiguous() on it where the model is built."
            )


def _require_one_dtype(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Raise ValueError for trainable parameters of different dtypes that are reduced together."""
    layer_of = {parameter: number for number, layer in enumerate(layers) for parameter in layer.parameters()}
    first: dict[int | None, tuple[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        other, example = first.setdefault(layer_of.get(parameter), (name, parameter))
        if example.dtype != parameter.dtype:
            raise ValueError(
                f"Parameter {name!r} has dtype {parameter.dtype}, and {other!r} has {example.dtype}. FSDP2 reduces the "
                "gradients of a layer together, so they need one dtype. Convert the model where it is built, for example "
                "with model.float(), and set mixed_precision='bf16' for compute in bfloat16."
            )
