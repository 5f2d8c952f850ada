"""Quantisation-aware training (QAT): fake-quantised linear layers for training, and the final conversion, by torchao.

Trainers call `require_qat` and `prepare_qat`; `finalize` calls `convert_qat`. Preparation keeps layers, parameters and
FQNs, so checkpoints of QAT runs are ordinary checkpoints.
"""

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forgather.ml.quantization import QAT_RECIPES as QAT_RECIPES
from forgather.ml.quantization.float8 import float8_problem, misalignment, require_torchao, special_layer_reason
from forgather.ml.quantization.layer_report import LayerReport, choose_layers, linear_layers, shared_parameters

if TYPE_CHECKING:
    from torchao.core.config import AOBaseConfig  # type: ignore[import-untyped]

GROUP_SIZE = 32
"""Number of weights that share a scale; torchao's default."""
# Float8 matrix products need dimensions that are multiples of 16.
_FLOAT8_ALIGNMENT = 16
_MARK = "_qat_recipe"
"""Attribute of a prepared layer: recipe and group size."""
# torch's type hints do not list this dtype.
_INT4: torch.dtype = getattr(torch, "int4")  # noqa: B009


class StraightThrough(nn.Module):
    """Straight-through estimator: quantises in the forward pass, and passes gradients through unchanged.

    For quantisers that damage gradients: torchao's float8 quantiser casts them to float8, where most become zero.
    """

    def __init__(self, quantizer: nn.Module) -> None:
        super().__init__()
        self.quantizer = quantizer

    def forward(self, tensor: Tensor) -> Tensor:
        with torch.no_grad():
            change: Tensor = self.quantizer(tensor) - tensor
        return tensor + change


def recipe_to_base_config(recipe: str, group_size: int = GROUP_SIZE) -> "AOBaseConfig":
    """Return torchao's configuration for a recipe.

    int4 weights are stored in one byte each, which every device can read.
    """
    _check_recipe(recipe)
    require_torchao("qat_recipe", recipe)
    from torchao.quantization import (  # type: ignore[import-untyped]
        Float8DynamicActivationFloat8WeightConfig,
        Int8DynamicActivationIntxWeightConfig,
        IntxWeightOnlyConfig,
        PerGroup,
    )

    if recipe == "int8-dynamic-act-int4-weight":
        return Int8DynamicActivationIntxWeightConfig(weight_dtype=_INT4, weight_granularity=PerGroup(group_size))
    if recipe == "int4-weight-only":
        return IntxWeightOnlyConfig(weight_dtype=_INT4, granularity=PerGroup(group_size))
    return Float8DynamicActivationFloat8WeightConfig()


def require_qat(recipe: str, device_type: str) -> None:
    """Raise `ValueError` unless a model can be trained for this recipe, and converted, on a device of this type."""
    _check_recipe(recipe)
    require_torchao("qat_recipe", recipe)
    problem = float8_problem(device_type) if _is_float8(recipe) else None
    if problem is not None:
        raise ValueError(
            f"The recipe {recipe!r} cannot be used here: the trained model could neither be converted nor run. torchao "
            f"quantises to float8 only on hardware that multiplies in float8, and {problem}. Choose "
            f"{' or '.join(repr(one) for one in QAT_RECIPES if not _is_float8(one))}, which work on every device."
        )


def prepare_qat(
    model: nn.Module, recipe: str, keep: Collection[nn.Module] = (), group_size: int = GROUP_SIZE
) -> LayerReport:
    """Make the linear layers of a model, except those in `keep`, compute as if they were quantised.

    Layers and parameters stay the same objects under the same names: optimizers, checkpoints and hooks are not
    affected.
    """
    config = recipe_to_base_config(recipe, group_size)
    chosen, report = _choose(model, recipe, keep, group_size)
    _refuse_other_recipe(chosen.values(), recipe, group_size)
    for layer in chosen.values():
        # A prepared layer has torchao's class, so preparing a model twice changes nothing.
        if type(layer) is nn.Linear:
            _prepare(layer, config, _is_float8(recipe))
            vars(layer)[_MARK] = (recipe, group_size)
    report.log(f"qat_recipe={recipe!r}")
    return report


def prepared_for(model: nn.Module) -> str | None:
    """Return the recipe that the layers of a model were prepared for, or None."""
    marks = (vars(module)[_MARK] for module in model.modules() if _MARK in vars(module))
    return next((recipe for recipe, _ in marks), None)


def convert_qat(
    model: nn.Module, recipe: str, keep: Collection[nn.Module] = (), group_size: int = GROUP_SIZE
) -> LayerReport:
    """Quantise a model in place, whether it was prepared or not; a quantised model cannot be trained further."""
    config = recipe_to_base_config(recipe, group_size)
    from torchao.quantization import quantize_

    # Fake quantisers are for training only; torchao converts plain layers.
    for layer in linear_layers(model).values():
        _undo(layer)
    chosen, report = _choose(model, recipe, keep, group_size)
    layers = set(chosen.values())
    quantize_(model, config, filter_fn=lambda module, name: module in layers)
    report.log(f"quantised by {recipe!r}")
    return report


def _choose(
    model: nn.Module, recipe: str, keep: Collection[nn.Module], group_size: int
) -> tuple[dict[str, nn.Linear], LayerReport]:
    from torchao.quantization.qat.linear import FakeQuantizedLinear  # type: ignore[import-untyped]

    shared = shared_parameters(model)

    def obstacle(layer: nn.Linear) -> str | None:
        if type(layer) not in (nn.Linear, FakeQuantizedLinear):
            return special_layer_reason(layer)
        if layer.weight.dtype == torch.float64:
            return "its weight is float64, which torchao does not quantise"
        if layer.weight in shared:
            return "it shares its weight with another layer"
        if _is_float8(recipe):
            return misalignment(layer.in_features, layer.out_features, _FLOAT8_ALIGNMENT)
        if layer.in_features % group_size:
            return f"in_features={layer.in_features} cannot be divided by the group size {group_size}"
        return None

    return choose_layers(model, keep, obstacle)


def _prepare(layer: nn.Linear, config: "AOBaseConfig", needs_straight_through: bool) -> None:
    """Give a layer the class and the fake quantisers that torchao creates for its shape."""
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig  # type: ignore[import-untyped]

    # In place, since hooks and other references would keep the old layer. The template is on the meta device: torchao
    # would otherwise initialise a new weight, which costs memory and draws random numbers.
    template = nn.Sequential(nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta"))
    quantize_(template, QATConfig(config, step="prepare"))
    prepared: Any = template[0]
    for name in ("activation_fake_quantizer", "weight_fake_quantizer"):
        quantizer = getattr(prepared, name)
        if quantizer is not None and needs_straight_through:
            quantizer = StraightThrough(quantizer)
        setattr(layer, name, quantizer)
    layer.__class__ = type(prepared)


def _refuse_other_recipe(layers: Iterable[nn.Linear], recipe: str, group_size: int) -> None:
    others = {vars(layer)[_MARK] for layer in layers if _MARK in vars(layer)} - {(recipe, group_size)}
    for other, size in others:
        raise ValueError(
            f"qat_recipe={recipe!r} (groups of {group_size}) cannot be applied: the model's layers are already prepared for "
            f"{other!r} (groups of {size}). Build the model again, for instance by passing model_init to the trainer."
        )


def _undo(layer: nn.Linear) -> None:
    """Turn a prepared layer back into a plain `nn.Linear`."""
    from torchao.quantization.qat.linear import FakeQuantizedLinear

    if isinstance(layer, FakeQuantizedLinear):
        del layer.activation_fake_quantizer, layer.weight_fake_quantizer
        vars(layer).pop(_MARK, None)
        layer.__class__ = nn.Linear


def _is_float8(recipe: str) -> bool:
    return recipe.startswith("float8")


def _check_recipe(recipe: str) -> None:
    if recipe not in QAT_RECIPES:
        raise ValueError(
            f"qat_recipe={recipe!r}: there is no such recipe; choose from {', '.join(map(repr, QAT_RECIPES))}."
        )
