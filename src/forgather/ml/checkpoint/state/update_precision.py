"""State of parameters that an optimizer updates in a wider dtype: master weights, and stochastic rounding.

Both are entries of the optimizer state of a parameter, so they are stored by FQN. This module checks them, and converts
between checkpoints of runs with different `param_precision`. `OptimizerState` and `StateChecks` call it.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from forgather.ml.checkpoint.state.optimizer_options import OptimizerLike
from forgather.ml.checkpoint.state.tensor_checks import Where, check_mapping, check_tensor, whole_number

logger = logging.getLogger(__name__)

MASTER = "master_weight"
"""State key of the float32 copy of a parameter, which the optimizer updates."""
ROUNDING = "stochastic_rounding"
"""State key of the seed and the number of roundings of a parameter."""
PRECISION_KEYS = frozenset({MASTER, ROUNDING})


@runtime_checkable
class PreciseUpdates(Protocol):
    """Protocol of a wrapper that lets an optimizer update low-precision parameters in a wider dtype."""

    @property
    def optimizer(self) -> OptimizerLike: ...

    @property
    def update_dtype(self) -> torch.dtype: ...

    @property
    def state_key(self) -> str:
        """MASTER or ROUNDING: the entry that the wrapper adds to the state of each parameter."""


def is_short(parameter: Tensor) -> bool:
    """Return whether a parameter has a floating dtype with less precision than float32."""
    return parameter.is_floating_point() and torch.promote_types(parameter.dtype, torch.float32) != parameter.dtype


def dtype_of_update(parameter: Tensor, wide: torch.dtype | None) -> torch.dtype:
    return wide if wide is not None and is_short(parameter) else parameter.dtype


def check_precision_entry(key: str, value: object, parameter: Tensor, where: Where) -> Tensor | None:
    """Raise `CheckpointLoadError` for an invalid master weight or rounding state; return a master weight, else None."""
    if key == MASTER:
        return check_tensor(value, where, shape=tuple(parameter.shape), kind="floating", like=parameter)
    state = check_mapping(value, where)
    whole_number(state.get("count"), where.at("count"), least=0)
    whole_number(state.get("seed"), where.at("seed"), least=-(2**63), most=2**64)
    return None


@torch.no_grad()
def adopted(saved: Mapping[str, Any], parameter: Tensor, state_key: str | None) -> dict[str, Any]:
    """Return a saved state without the entries of another `param_precision`.

    A parameter in full precision takes the value of its master weight: its weights file has only the rounded value.
    """
    if MASTER in saved and state_key is None and not is_short(parameter):
        parameter.copy_(saved[MASTER])
    return {key: value for key, value in saved.items() if key not in PRECISION_KEYS or key == state_key}


def log_change(saved: Iterable[Mapping[str, Any]], state_key: str | None) -> None:
    """Log how a run continues from a checkpoint of another `param_precision`."""
    states = [one for one in saved if one]
    found = next((key for key in sorted(PRECISION_KEYS) if any(key in one for one in states)), None)
    if not states or found == state_key:
        return
    if state_key == MASTER:
        logger.info("The checkpoint has no master weights: they start from the weights, which are rounded to bfloat16.")
    elif found == MASTER:
        kept = "The weights continue from them" if state_key is None else "The weights stay rounded to bfloat16"
        logger.info("The checkpoint has float32 master weights (param_precision='bf16_master'). %s.", kept)
