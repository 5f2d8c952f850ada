"""Schema checks for learning-rate scheduler states from checkpoints.

torch's `load_state_dict` assigns every key of a state as an attribute, so a bad state could replace methods or values
unnoticed. A state is accepted only if its keys and value types match the state of the running scheduler.
`SchedulerState` calls these checks before it loads.
"""

import functools
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.checkpoint.state.state_schema import (
    Check,
    Schema,
    Violation,
    anything,
    at,
    count,
    every,
    flag,
    list_like,
    list_of,
    mapping_of,
    number,
    optional,
    plain,
    position,
    rate,
    require_mapping,
    text,
    that,
)

_COUNTERS = frozenset({"last_epoch", "_step_count", "num_bad_epochs", "cooldown_counter"})
# Lists with one number per parameter group.
_RATES = frozenset({"base_lrs", "_last_lr", "min_lrs", "max_lrs", "base_momentums", "max_momentums"})
_PARTS = frozenset({"_schedulers", "_schedule_phases"})
_FUNCTIONS = frozenset({"lr_lambdas", "_scale_fn_custom"})
# Torch pops these keys while it loads. Without them it may raise halfway, with a partly loaded scheduler.
_NEEDED = _FUNCTIONS | {"_schedulers"}
# Mode names of torch's schedulers. Any other word fails or selects a different mode at a later step.
_WORDS = (
    ("min", "max"),
    ("rel", "abs"),
    ("cos", "linear"),
    ("cycle", "iterations"),
    ("triangular", "triangular2", "exp_range"),
    ("initial_lr", "max_lr", "min_lr"),
    ("base_momentum", "max_momentum"),
)


def unwrapped(scheduler: object) -> Any:
    """Return the scheduler inside Accelerate's wrapper, or the scheduler itself."""
    inner = getattr(scheduler, "scheduler", None)
    return inner if isinstance(inner, LRScheduler) and not isinstance(scheduler, LRScheduler) else scheduler


def group_lists(scheduler: object, state: object) -> None:
    """Check the lists that show the number of parameter groups of a state."""
    require_mapping(state)
    if isinstance(scheduler, LRScheduler):
        lists = {"base_lrs": list_of(anything), "_last_lr": list_of(anything)}
        Schema({**lists, "lr_lambdas": list_of(optional(require_mapping))}, may_lack=(*lists, "lr_lambdas"))(state)


def like_scheduler(scheduler: object, state: Mapping[str, Any], any_groups: bool = False) -> None:
    """Check that a state has only keys of the scheduler, with values of the same type.

    `any_groups` allows any number of rates, for schedules that recompute their rates.
    """
    # Nothing is known about a scheduler that is not an LRScheduler. Its state must be plain data.
    if not isinstance(scheduler, LRScheduler):
        every(require_mapping, plain)(state)
        return
    own = scheduler.state_dict()
    if not type(scheduler).__module__.startswith("torch."):
        # A user's class may add attributes while it runs, so new keys are allowed. Keys that would hide a method or
        # class attribute are not.
        _require_dict(state)
        more = {
            name: value for name, value in state.items() if name not in own and not hasattr(type(scheduler), str(name))
        }
        plain(more)
        state = {name: value for name, value in state.items() if name not in more}
    _like_state(state, own, any_groups)


def _like_state(state: object, own: Mapping[str, Any], any_groups: bool = False) -> None:
    _require_dict(state)
    assert isinstance(state, dict)
    for name in state:
        if name not in own:
            raise UnknownKeyViolation("absent, since this kind of scheduler has no such setting", state[name], [name])
    for name, value in own.items():
        if name not in state and name in _NEEDED:
            raise Violation(f"a dict that has the key {name!r}", state)
        if name in state:
            at(name, _check_for(name, value, any_groups), state[name])


class UnknownKeyViolation(Violation):
    """Violation by a key that belongs to another kind of scheduler."""


def mismatch(violation: Violation, root: str, kind: str) -> CheckpointLoadError:
    """Return the error for the state of another kind of scheduler."""
    # A misfit, not damage: earlier checkpoints of the run have the same state, so a resume must not fall back to them.
    return CheckpointLoadError.misfit(
        f"{violation.message(root)}. This run's scheduler is {kind}; the checkpoint seems to come from another kind. Nothing "
        'was loaded. Use the same kind as before, or start a new schedule with skip_checkpoint_components=["scheduler"].'
    )


def _check_for(name: str, own: object, any_groups: bool) -> Check:
    if name in _COUNTERS:
        return position
    if name == "lr_lambdas" and isinstance(own, list):
        return list_like([_function_state(item) for item in own])
    if name == "_scale_fn_custom" and (own is None or isinstance(own, Mapping)):
        return _function_state(own)
    if type(own) is list and name in _RATES and not any_groups:
        return list_of(rate, len(own))
    if type(own) is list and name == "_milestones":
        return list_of(count, len(own))
    if name in _PARTS and type(own) is list and all(type(item) is dict for item in own):
        return list_like([functools.partial(_like_state, own=item) for item in own])
    return _like(own)


def _like(own: object) -> Check:
    """Return a check for values of the same type as the running scheduler's value."""
    if type(own) is bool:
        return flag
    if type(own) in (int, float):
        return number
    if type(own) is Tensor:
        return rate
    if type(own) is str:
        return _like_word(own)
    if type(own) is Counter:
        return every(that("a Counter", lambda value: type(value) is Counter), mapping_of(count, count))
    if isinstance(own, Mapping):
        return every(require_mapping, plain)
    if type(own) is list or type(own) is tuple:
        is_numbers = own and all(type(item) in (int, float, Tensor) for item in own)
        return list_of(rate if is_numbers else plain)
    # None and other types may change into anything while the scheduler runs.
    return plain


def _like_word(own: str) -> Check:
    words = next((words for words in _WORDS if own in words), None)
    if words is None:
        return text
    return that(f"one of {', '.join(words)}", lambda value: type(value) is str and value in words)


def _function_state(own: Mapping[str, Any] | None) -> Check:
    """Return a check for the saved attributes of a callable; a plain function has none."""

    def check(value: object) -> None:
        if value is None or (isinstance(value, Mapping) and len(value) == 0):
            return
        if not own:
            raise Violation("None, since the function has no attributes", value)
        mapping_of(text, plain)(value)
        assert isinstance(value, Mapping)
        for name in value:
            if name in own:
                at(name, _like(own[name]), value[name])

    return check


def _require_dict(state: object) -> None:
    if type(state) is not dict:
        raise Violation("a dict", state)
    for name in state:
        at(name, text, name)
