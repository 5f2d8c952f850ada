"""Float8 training: linear layers that multiply in float8, by torchao.

`require_fp8` checks the recipe and the hardware before training; `convert_to_fp8` replaces the layers of the model. The
parameters stay the same objects under the same FQNs. Called by the trainers.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import nn

from forgather._extras import is_installed, missing_message
from forgather.ml.quantization import FP8_RECIPES as FP8_RECIPES
from forgather.ml.quantization.layer_report import LayerReport, choose_layers

# NVIDIA's Ada generation.
_LEAST_CAPABILITY = (8, 9)


def require_fp8(recipe: str, device_type: str) -> None:
    """Raise `ValueError` unless this recipe can train on a device of this type."""
    _check_recipe(recipe)
    require_torchao("fp8_recipe", recipe)
    problem = float8_problem(device_type)
    if problem is not None:
        raise ValueError(
            f"fp8_recipe={recipe!r} needs hardware that multiplies in float8, but {problem}. Set fp8_recipe=None; "
            "mixed_precision='bf16' is the next best on most hardware."
        )


def convert_to_fp8(
    model: nn.Module, recipe: str, dim_alignment: int = 16, keep: Collection[nn.Module] = ()
) -> LayerReport:
    """Replace the linear layers, except those in `keep`, by layers that multiply in float8.

    Parameters stay the same objects. Works on every device; only forward passes need the hardware (see `require_fp8`).
    """
    _check_recipe(recipe)
    require_torchao("fp8_recipe", recipe)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # type: ignore[import-untyped]
    from torchao.float8.float8_linear import Float8Linear  # type: ignore[import-untyped]

    def obstacle(layer: nn.Linear) -> str | None:
        if layer is model:
            return "it is the model itself, which cannot be replaced"
        if type(layer) not in (nn.Linear, Float8Linear):
            return special_layer_reason(layer)
        return misalignment(layer.in_features, layer.out_features, dim_alignment)

    chosen, report = choose_layers(model, keep, obstacle)
    # Layers that were converted before are reported as converted, but not replaced again.
    layers = {layer for layer in chosen.values() if not isinstance(layer, Float8Linear)}
    config = Float8LinearConfig.from_recipe_name(recipe)
    if recipe != "rowwise_with_gw_hp":
        # The weight's gradient sums over tokens, and their number may not be a multiple that the hardware requires. The
        # "gw_hp" recipe computes this product in high precision.
        config = replace(config, pad_inner_dim=True)
    names = {name: module for name, module in model.named_modules(remove_duplicate=False) if module in layers}
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: module in layers)
    _make_one_again(model, names)
    report.log(f"fp8_recipe={recipe!r}")
    return report


def _make_one_again(model: nn.Module, names: Mapping[str, nn.Module]) -> None:
    """Restore sharing: a layer with several names was replaced under some of them, or by several layers."""
    new: dict[nn.Module, nn.Module] = {}
    for name, old in names.items():
        if (replaced := model.get_submodule(name)) is not old:
            new.setdefault(old, replaced)
    for name, old in names.items():
        model.set_submodule(name, new[old])


def float8_problem(device_type: str) -> str | None:
    """Return why devices of this type cannot multiply in float8 on this machine, or None if they can."""
    if device_type == "xpu":
        return None
    if device_type != "cuda":
        return f"the device is {device_type!r}, which cannot"
    if torch.version.hip is not None:
        from torchao.utils import is_MI300, is_MI350  # type: ignore[import-untyped]

        name = torch.cuda.get_device_name()
        return None if is_MI300() or is_MI350() else f"the GPU ({name}) is older than the MI300"
    return capability_problem(torch.cuda.get_device_capability(), torch.cuda.get_device_name())


def capability_problem(capability: tuple[int, int], name: str) -> str | None:
    """Return why an NVIDIA GPU with this compute capability cannot multiply in float8, or None if it can."""
    if capability >= _LEAST_CAPABILITY:
        return None
    found, least = (f"{major}.{minor}" for major, minor in (capability, _LEAST_CAPABILITY))
    return f"the GPU ({name}) has compute capability {found}, and float8 needs at least {least}"


def misalignment(in_features: int, out_features: int, alignment: int) -> str | None:
    """Return which dimensions of a layer are not multiples of `alignment`, or None if both are."""
    sizes = {"in_features": in_features, "out_features": out_features}
    wrong = [f"{name}={size}" for name, size in sizes.items() if size % alignment]
    return f"{' and '.join(wrong)} cannot be divided by {alignment}" if wrong else None


def special_layer_reason(layer: nn.Linear) -> str:
    """Return the reason to skip a subclass of `nn.Linear`.

    The module that owns it may use the weight without calling the layer, as torch's attention does.
    """
    return f"it is a {type(layer).__name__}, not a plain nn.Linear"


def require_torchao(argument: str, recipe: str) -> None:
    """Raise `ValueError` when torchao is not installed."""
    if not is_installed("torchao"):
        raise ValueError(f"{missing_message(f'{argument}={recipe!r}', 'torchao')}, or set {argument}=None.")


def _check_recipe(recipe: str) -> None:
    if recipe not in FP8_RECIPES:
        raise ValueError(
            f"fp8_recipe={recipe!r}: there is no such recipe; choose from {', '.join(map(repr, FP8_RECIPES))}."
        )
