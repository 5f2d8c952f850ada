"""Building the model: on the CPU, on its device, or without memory until a checkpoint fills it."""

import contextlib
import functools
import logging
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from forgather.ml.checkpoint.weights.module_weights import create_sharing_metadata, retie_parameters
from forgather.ml.construct import torch_dtype
from forgather.ml.no_init_weights import no_init_weights
from forgather.ml.trainer.setup.given_objects import checked_model
from forgather.ml.utils import default_dtype

logger = logging.getLogger(__name__)


def build_model(
    model_init: Callable[[], nn.Module],
    device: torch.device,
    construct_on: str,
    dtype: str | None,
    will_be_loaded: bool,
    fill_buffers: Callable[[nn.Module], None] | None = None,
) -> nn.Module:
    """Call `model_init` and put the model on its device; weights that a checkpoint replaces are not initialised.

    `fill_buffers` computes the non-persistent buffers of a model that was built on the meta device.
    """
    if construct_on == "meta" and not will_be_loaded:
        logger.warning(
            "construct_model_on='meta' needs a checkpoint to fill the model from, and there is none: building it as usual."
        )
        construct_on = "default"
    with contextlib.ExitStack() as context:
        context.enter_context(default_dtype(None if dtype is None else torch_dtype(dtype)))
        if will_be_loaded:
            context.enter_context(no_init_weights())
        if construct_on == "meta":
            return _materialised(model_init, device, fill_buffers)
        if construct_on == "device":
            context.enter_context(device)
        return model_init().to(device)


def refuse_adapters(model: nn.Module) -> None:
    """Raise for a model of PEFT, or one that PEFT or transformers put adapters into."""
    found = next((said for said in map(_adapter_in, model.modules()) if said is not None), None)
    if found is not None:
        raise ValueError(
            f"The model is a {type(model).__name__} with adapters of PEFT ({found}), which this version of forgather cannot "
            "train: its checkpoints and exports would lack the adapters, or have the weights under names that "
            "from_pretrained does not know. Merge the adapters of a PeftModel, model = model.merge_and_unload(), and let its "
            "parameters require gradients again; or train the model without adapters."
        )


def refuse_quantized(model: nn.Module) -> None:
    """Raise for a model with quantised weights, which can be evaluated, but neither trained nor saved."""
    kinds = {name: _quantized_kind(parameter) for name, parameter in model.named_parameters()}
    name, kind = next(((name, kind) for name, kind in kinds.items() if kind is not None), ("", None))
    if kind is None and getattr(model, "is_quantized", False) is not True:
        return
    found = f"its weight {name!r} is a {kind}" if kind else "transformers says that it is (is_quantized)"
    raise ValueError(
        f"The {type(model).__name__} is quantised ({found}), and cannot be trained: its weights take no updates, and could not "
        "be saved. Train the model in full precision, for instance from the checkpoint that was quantised, with qat_recipe "
        "to train for the quantisation; forgather finalize --quantize then quantises the result."
    )


def _quantized_kind(parameter: nn.Parameter) -> str | None:
    kind = type(parameter) if type(parameter) is not nn.Parameter else type(parameter.data)
    is_known = kind.__module__.partition(".")[0] in ("torchao", "bitsandbytes") or parameter.is_quantized
    return kind.__name__ if is_known else None


def checked_builder(model_init: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A function that builds the same model, and refuses what is no model, or one with adapters."""

    @functools.wraps(model_init)
    def build() -> nn.Module:
        model = checked_model(model_init(), model_init)
        refuse_adapters(model)
        return model

    return build


def _adapter_in(module: nn.Module) -> str | None:
    """What a module says of adapters; PEFT is asked only where somebody has imported it, since else there are none."""
    kind = type(module).__name__
    if getattr(module, "_hf_peft_config_loaded", False):
        return f"{kind} was given some by add_adapter"
    classes = (("peft.peft_model", "PeftModel"), ("peft.tuners.tuners_utils", "BaseTunerLayer"))
    for place, name in classes:
        known = getattr(sys.modules.get(place), name, None)
        if known is not None and isinstance(module, known):
            return f"{kind} is a {name}"
    return None


def _materialised(
    model_init: Callable[[], nn.Module], device: torch.device, fill_buffers: Callable[[nn.Module], None] | None
) -> nn.Module:
    with torch.device("meta"):
        model = model_init()
    sharing = create_sharing_metadata(model)
    model.to_empty(device=device)
    # `to_empty` gives every name memory of its own; tied ones must be one tensor again before they are loaded.
    retie_parameters(model, sharing)
    if fill_buffers is None:
        compute_missing_buffers(model, model_init)
    else:
        fill_buffers(model)
    return model


def missing_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Buffers that are not part of the state, so that no checkpoint brings them: rotary frequencies, masks."""
    stored = set(module.state_dict(keep_vars=True))
    return {name: buffer for name, buffer in module.named_buffers(remove_duplicate=False) if name not in stored}


def compute_missing_buffers(model: nn.Module, model_init: Callable[[], nn.Module]) -> None:
    """Give the buffers that no checkpoint holds the values that construction gives them.

    `model` may be a part of what `model_init` builds, under the same names.
    """
    missing = missing_buffers(model)
    if not missing:
        return
    # Only buffers are wanted: parameters of this copy stay without memory.
    values = dict(with_real_buffers(model_init).named_buffers(remove_duplicate=False))
    for name, buffer in missing.items():
        buffer.copy_(values[name])


def with_real_buffers(model_init: Callable[[], nn.Module]) -> nn.Module:
    """A model whose buffers are real and whose parameters are on the meta device."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
    try:
        with no_init_weights():
            return model_init()
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
