"""Learning-rate schedules of other programs: checks the state of a torch scheduler before it is loaded.

torch sets every key of a state as an attribute of the scheduler. A state may therefore have only keys of the running
scheduler, with values of the same type. `importing` calls this module.
"""

from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from forgather.ml.checkpoint.errors import CheckpointLoadError

_NUMBERS = (int, float)
_GROUP_LISTS = ("base_lrs", "_last_lr")


def fitting_schedule(state: Any, stateful: Any) -> dict[str, Any]:
    """Return the state in the form that `stateful` accepts, or raise `CheckpointLoadError`; change nothing."""
    if not isinstance(state, dict):
        raise CheckpointLoadError(f"it is a {type(state).__name__}, but the state of a scheduler must be a dict")
    own: dict[str, Any] = stateful.state_dict()
    fitting = _with_own_functions(state, own)
    if hasattr(stateful, "check_state_dict"):
        stateful.check_state_dict(fitting)
    elif isinstance(stateful, LRScheduler):
        _check_like(fitting, own, type(stateful).__name__)
    else:
        raise CheckpointLoadError(
            f"{type(stateful).__name__} cannot check a state of another program (no check_state_dict)"
        )
    return fitting


def _with_own_functions(state: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the functions in the state of a LambdaLR by this run's functions, if all of them are stateless.

    Functions without state are saved as None or {}. If the number of parameter groups differs, only the step count is
    kept: the learning rates of the groups are dropped.
    """
    functions, mine = state.get("lr_lambdas"), own.get("lr_lambdas")
    if not isinstance(functions, list) or not isinstance(mine, list) or any(functions) or any(mine):
        return state
    if len(functions) == len(mine):
        return {**state, "lr_lambdas": mine}
    # A LambdaLR computes the learning rate from the step alone, so the step is enough to resume it.
    return {name: value for name, value in state.items() if name not in _GROUP_LISTS} | {"lr_lambdas": mine}


def _check_like(state: Mapping[str, Any], own: Mapping[str, Any], kind: str) -> None:
    unknown = sorted(str(name)[:100] for name in state if name not in own)
    if unknown:
        raise CheckpointLoadError(f"{unknown[0]!r} belongs to a different kind of scheduler than {kind}")
    for name, value in state.items():
        if not _is_like(value, own[name]):
            raise CheckpointLoadError(f"{name!r} has a different type of value than in {kind}")


def _is_like(value: Any, own: Any) -> bool:
    if isinstance(own, list | tuple):
        same_length = type(value) is type(own) and len(value) == len(own)
        return same_length and all(_is_like(one, mine) for one, mine in zip(value, own, strict=True))
    if type(own) in _NUMBERS:
        # An integer and a float are interchangeable, for example learning rates of 1 and 0.1.
        return type(value) in _NUMBERS
    return type(value) is type(own) and (not isinstance(own, dict) or set(value) <= set(own))
