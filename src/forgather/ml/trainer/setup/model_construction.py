"""Model construction: on the CPU, on the target device, or on the meta device until a checkpoint fills it.

Weights that a checkpoint will replace are not initialised. Models that cannot be trained or saved (PEFT adapters,
quantised weights) raise ValueError. The set-up of trainers and of pipeline stages calls it.
"""

import contextlib
import functools
import logging
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from forgather.ml.checkpoint.state.rng import RNGState
from forgather.ml.checkpoint.weights.adapters import is_peft_model, uses_prompts
from forgather.ml.checkpoint.weights.index import create_sharing_metadata, retie_parameters
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
    """Call `model_init` and return the model on its device.

    With `will_be_loaded`, weights are not initialised. `fill_buffers` computes the non-persistent buffers of a model
    that was built on the meta device.
    """
    if construct_on == "meta" and not will_be_loaded:
        logger.warning(
            "construct_model_on='meta' needs a checkpoint to fill the model, but none was found: using 'default' instead."
        )
        construct_on = "default"
    # Parameters are created in the default dtype, which avoids a float32 copy of a bfloat16 model.
    with contextlib.ExitStack() as context:
        context.enter_context(default_dtype(None if dtype is None else torch_dtype(dtype)))
        if will_be_loaded:
            context.enter_context(no_init_weights())
        random_state = RNGState()
        before = random_state.state_dict() if will_be_loaded else {}
        if construct_on == "meta":
            model = _materialised(model_init, device, fill_buffers)
        else:
            context.enter_context(device if construct_on == "device" else contextlib.nullcontext())
            model = model_init().to(device)
    if not (will_be_loaded and is_peft_model(model)):
        return model
    # A checkpoint of adapters does not contain the frozen weights, so they must be initialised after all.
    random_state.load_state_dict(before)
    del model
    return build_model(model_init, device, "default" if construct_on == "meta" else construct_on, dtype, False)


def refuse_adapters(model: nn.Module, accepts_peft: bool = False) -> None:
    """Raise ValueError for a PEFT model, or a model with adapters added by PEFT or transformers.

    `accepts_peft`: the trainer can train a `PeftModel` that adds no virtual tokens.
    """
    if accepts_peft and is_peft_model(model):
        if uses_prompts(model):
            raise ValueError(
                f"The {type(model).__name__} has PEFT adapters that add virtual tokens to the input (prompt learning), which "
                "this version of forgather cannot train: logits and labels differ in length. Use LoRA or another method "
                "that changes layers, or train the model without adapters."
            )
        return
    found = next((said for said in map(_adapter_in, model.modules()) if said is not None), None)
    if found is not None:
        raise ValueError(
            f"The {type(model).__name__} has PEFT adapters ({found}), which this trainer cannot train: checkpoints and exports "
            "would lack the adapters, or have names that from_pretrained does not know. Pass a PeftModel (get_peft_model) as "
            "model= of Trainer, DDPTrainer, FSDP2Trainer or AccelTrainer; pipelines cannot train it, and FSDP2Trainer does not "
            "take it from model_init. Or merge the adapters of a PeftModel with model = model.merge_and_unload() "
            "and set requires_grad on its parameters, or train the model without adapters."
        )


def refuse_quantized(model: nn.Module) -> None:
    """Raise ValueError for quantised weights, which can be evaluated but neither trained nor saved."""
    kinds = {name: _quantized_kind(parameter) for name, parameter in model.named_parameters()}
    name, kind = next(((name, kind) for name, kind in kinds.items() if kind is not None), ("", None))
    if kind is None and getattr(model, "is_quantized", False) is not True:
        return
    found = f"its weight {name!r} is a {kind}" if kind else "transformers sets is_quantized"
    raise ValueError(
        f"The {type(model).__name__} is quantised ({found}) and cannot be trained: its weights can be neither updated nor "
        "saved. Train the original model in full precision, with qat_recipe for quantisation-aware training. Quantise the "
        "result with forgather finalize --quantize."
    )


def _quantized_kind(parameter: nn.Parameter) -> str | None:
    # The quantised class may be the type of the parameter or of the tensor inside a plain Parameter.
    kind = type(parameter) if type(parameter) is not nn.Parameter else type(parameter.data)
    is_known = kind.__module__.partition(".")[0] in ("torchao", "bitsandbytes") or parameter.is_quantized
    return kind.__name__ if is_known else None


def checked_builder(model_init: Callable[[], nn.Module], accepts_peft: bool = False) -> Callable[[], nn.Module]:
    """Wrap `model_init` so that it raises ValueError unless it returns a model that `refuse_adapters` accepts."""

    @functools.wraps(model_init)
    def build() -> nn.Module:
        model = checked_model(model_init(), model_init)
        refuse_adapters(model, accepts_peft)
        return model

    return build


def _adapter_in(module: nn.Module) -> str | None:
    """Return a description of the adapters of a module, or None."""
    # Look PEFT's classes up in sys.modules: if PEFT was never imported, there are no adapters.
    kind = type(module).__name__
    if getattr(module, "_hf_peft_config_loaded", False):
        return f"{kind} has adapters from add_adapter"
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
    # Record tied weights now: after `to_empty` they can no longer be recognised by identity.
    sharing = create_sharing_metadata(model)
    model.to_empty(device=device)
    # `to_empty` allocates separate memory for every name. Tied weights must be one tensor again before the load.
    retie_parameters(model, sharing)
    if fill_buffers is None:
        compute_missing_buffers(model, model_init)
    else:
        fill_buffers(model)
    return model


def missing_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the non-persistent buffers, such as rotary frequencies and masks, which no checkpoint contains."""
    stored = set(module.state_dict(keep_vars=True))
    return {name: buffer for name, buffer in module.named_buffers(remove_duplicate=False) if name not in stored}


def compute_missing_buffers(model: nn.Module, model_init: Callable[[], nn.Module]) -> None:
    """Fill non-persistent buffers with the values that `model_init` computes.

    `model` may be a submodel, such as a pipeline stage, with the FQNs of the full model.
    """
    missing = missing_buffers(model)
    if not missing:
        return
    # Only the buffers of this second copy are needed, so its parameters stay on the meta device.
    values = dict(with_real_buffers(model_init).named_buffers(remove_duplicate=False))
    for name, buffer in missing.items():
        buffer.copy_(values[name])


def with_real_buffers(model_init: Callable[[], nn.Module]) -> nn.Module:
    """Build a model with real buffers and with its parameters on the meta device."""
    # `torch.device("meta")` would put the buffers there as well, so registration is patched for parameters only.
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
