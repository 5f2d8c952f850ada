"""Precision of weights and updates (`param_precision`): bfloat16 parameters with float32 updates.

`bf16_master` keeps a float32 master weight of each parameter; `bf16_stochastic` rounds updates stochastically instead.
Both start from the rounded weights. `Recipes` and the pipeline set-up convert models with it.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from forgather.ml.checkpoint.state.update_precision import PreciseUpdates
from forgather.ml.trainer.recipes.precise_optimizer import MasterWeights, PreciseOptimizer, Rounding, StochasticRounding
from forgather.ml.trainer.trainer_types import OptimizerT


def with_param_precision(model: nn.Module, precision: str) -> nn.Module:
    """Convert floating-point parameters to bfloat16 in place, unless the precision is "fp32"; return the model.

    Buffers stay as built. Norms with running statistics (batch norm) stay as built too: torch's kernels need their
    parameters in the dtype of the statistics. So do modules that a Hugging Face model lists in
    `_keep_in_fp32_modules_strict`.
    """
    if precision == "fp32":
        return model
    kept = set(_kept_parameters(model))
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter not in kept:
            # The Parameter object stays, so that tied weights and a given optimizer still refer to it.
            parameter.data = parameter.data.to(torch.bfloat16)
    return model


def _kept_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    for module in model.modules():
        if isinstance(module, _NormBase) and module.running_mean is not None:
            yield from module.parameters(recurse=False)
    names = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    for name, parameter in model.named_parameters():
        if any(part in names for part in name.split(".")):
            yield parameter


def with_precise_updates(
    optimizer: OptimizerT, precision: str, named: Sequence[tuple[str, nn.Parameter]], seed: int
) -> OptimizerT:
    """Return an optimizer with float32 updates, unless the precision is "fp32" or the optimizer has them already."""
    if precision == "fp32" or isinstance(optimizer, PreciseUpdates):
        return optimizer
    rounding: Rounding = MasterWeights()
    if precision == "bf16_stochastic":
        # Reversed, because the first name of a tied parameter is its stored name.
        rounding = StochasticRounding({parameter: name for name, parameter in reversed(named)}, seed)
    return PreciseOptimizer(optimizer, rounding)
