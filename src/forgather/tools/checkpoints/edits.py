"""Changes of checkpoint state in place: values by path, optimizer options, and learning rates with their schedule.

`modification` reads the state, applies these functions and writes it back. A wrong key or type raises
`ModificationError` before anything is written.
"""

import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forgather._suggestions import did_you_mean

NewRate = Callable[[float], float]
"""Function from the base learning rate of a group to its new one."""
_ABSOLUTE_RATES = "max_lrs"
"""Entry of CyclicLR, whose rates come from the configuration at each start."""


_NEVER_NEGATIVE = ("lr", "weight_decay")
"""Options that optimizers of torch refuse below 0 at construction; a resume would accept them."""


class ModificationError(ValueError):
    """Requested change that does not fit the checkpoint: an unknown key, a wrong type, or a value that has no effect."""


@dataclass(frozen=True)
class Change:
    """One changed value of a checkpoint, and what it means for a resumed run."""

    key: str
    before: object
    after: object
    effect: str


def number_of(key: str, text: str) -> float:
    """Return the factor of a `--scale` option."""
    try:
        factor = float(text)
    except ValueError:
        raise ModificationError(f"--scale {key}={text}: the factor is not a number.") from None
    if factor != factor or factor in (float("inf"), float("-inf")):
        raise ModificationError(f"--scale {key}={text}: the factor must be finite.")
    return factor


def fitting(key: str, old: object, new: object) -> object:
    """Return the new value in the type of the old one; raise `ModificationError` if it has another type."""
    if isinstance(old, Tensor):
        if old.numel() != 1 or not _is_number(new):
            raise ModificationError(f"{key} is a tensor of shape {list(old.shape)}, which cannot be set to {new!r}.")
        return torch.full_like(old, new)  # type: ignore[arg-type]
    if isinstance(old, (list, tuple)):
        if not isinstance(new, (list, tuple)) or len(new) != len(old):
            raise ModificationError(f"{key}={new!r}: expected a list of {len(old)} values, such as {list(old)}.")
        return type(old)(fitting(key, before, after) for before, after in zip(old, new, strict=True))
    if isinstance(old, Mapping):
        raise ModificationError(f"{key} is a mapping: set one of its values, such as {key}.{next(iter(old), 'KEY')}.")
    if isinstance(old, float) and _is_number(new):
        return float(new)  # type: ignore[arg-type]
    if old is not None and type(new) is not type(old):
        raise ModificationError(f"{key}={new!r} has type {type(new).__name__}, expected {type(old).__name__}.")
    return new


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def scaled(key: str, value: object, factor: float) -> object:
    """Return a number, a tensor, or a list of numbers times a factor."""
    if isinstance(value, Tensor):
        return value * factor
    if isinstance(value, (list, tuple)):
        return type(value)(scaled(key, one, factor) for one in value)
    if not _is_number(value):
        raise ModificationError(f"{key} is {value!r}, which is not a number and cannot be scaled.")
    return value * factor  # type: ignore[operator]


def change_value(state: Any, path: Sequence[str], key: str, new: Callable[[object], object]) -> tuple[object, object]:
    """Replace the value at a path of keys in nested mappings and lists; return the values before and after."""
    holder, last = _holder_of(state, path, key)
    before = holder[last]
    holder[last] = new(before)
    return before, holder[last]


def _holder_of(state: Any, path: Sequence[str], key: str) -> tuple[Any, Any]:
    """Return the mapping or list that holds the value at a path, and its key there."""
    holder: Any = None
    last: Any = None
    current = state
    for name in path:
        holder, last = current, name
        if isinstance(current, MutableMapping):
            by_text = {str(one): one for one in current}
            if name not in by_text:
                raise ModificationError(
                    f"There is no value {key!r}.{did_you_mean(name, list(by_text))} Known here: {', '.join(by_text)}."
                )
            last = by_text[name]
        elif isinstance(current, list) and name.isdecimal() and int(name) < len(current):
            last = int(name)
        else:
            raise ModificationError(f"There is no value {key!r}: {name!r} leads nowhere.")
        current = current[last]
    return holder, last


def change_option(
    groups: Sequence[MutableMapping[str, Any]], option: str, key: str, new: Callable[[object], object]
) -> tuple[object, object]:
    """Replace an option in all parameter groups of an optimizer; return the values before and after, by group."""
    known = sorted({name for group in groups for name in group if name != "params"})
    if option not in known:
        raise ModificationError(
            f"The optimizer has no option {key!r}.{did_you_mean(option, known)} Its options are {', '.join(known)}."
        )
    own = [group for group in groups if option in group]
    before = [group[option] for group in own]
    for group in own:
        group[option] = new(group[option])
        _require_usable(option, group[option])
    return _joined(before), _joined([group[option] for group in own])


def change_rates(groups: Sequence[MutableMapping[str, Any]], new_rate: NewRate) -> tuple[object, object]:
    """Change the base learning rates of groups, and their current rates by the same factor.

    The base rate is `initial_lr` if a schedule is attached, else `lr`. Returns the base rates before and after.
    """
    before = [_base_rate(group) for group in groups]
    for group, base in zip(groups, before, strict=True):
        rate = new_rate(base)
        _require_usable("lr", rate)
        for name in ("lr", "initial_lr", "max_lr", "min_lr"):
            if name in group:
                group[name] = _in_proportion(group[name], base, rate)
    return _joined(before), _joined([_base_rate(group) for group in groups])


def _require_usable(option: str, value: object) -> None:
    """Raise `ModificationError` for numbers that would spoil the weights without an error: NaN, infinity, a negative rate."""
    for one in value if isinstance(value, (list, tuple)) else [value]:
        if not isinstance(one, Tensor) and not _is_number(one):
            continue
        number = float(one)  # type: ignore[arg-type]
        if not math.isfinite(number):
            raise ModificationError(f"optimizer.{option}={number}: options of an optimizer must be finite.")
        if number < 0 and option in _NEVER_NEGATIVE:
            raise ModificationError(f"optimizer.{option}={number}: it must not be negative.")


def change_schedule(state: MutableMapping[str, Any], new_rate: NewRate) -> None:
    """Change the base rates and the last rates in the state of a schedule, also of nested schedules."""
    if _ABSOLUTE_RATES in state:
        raise ModificationError(
            "The schedule is a CyclicLR, whose rates come from the configuration at each start. Change base_lr and max_lr "
            "of lr_scheduler in the configuration instead."
        )
    bases = list(state.get("base_lrs", state.get("_last_lr", ())))
    for name in ("base_lrs", "_last_lr"):
        if name in state:
            rates = list(state[name])
            # A schedule may record fewer last rates than it has groups.
            state[name] = [
                _in_proportion(rate, float(base), new_rate(float(base)))
                for rate, base in zip(rates, bases, strict=False)
            ]
    for inner in state.get("_schedulers", ()):
        if isinstance(inner, MutableMapping):
            change_schedule(inner, new_rate)


def _base_rate(group: Mapping[str, Any]) -> float:
    return float(group.get("initial_lr", group.get("lr", 0.0)))


def _in_proportion(rate: Any, base: float, new_base: float) -> Any:
    """Return a rate scaled as its base rate is; exactly the new base rate if it equals the base."""
    value = new_base if float(rate) == base else (float(rate) * new_base / base if base else float(rate))
    return torch.full_like(rate, value) if isinstance(rate, Tensor) else value


def _joined(values: Sequence[object]) -> object:
    """Return the common value of all groups, else the list of values."""
    plain = [one.tolist() if isinstance(one, Tensor) else one for one in values]
    return plain[0] if plain and all(one == plain[0] for one in plain) else plain
