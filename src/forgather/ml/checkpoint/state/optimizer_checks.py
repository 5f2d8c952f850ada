"""Validation of a saved optimizer state: structure, options of the param groups, and state tensors.

All checks run before `OptimizerState.load_state_dict` changes anything. The state of optimizers of torch is checked key
by key; for other optimizers only the memory layout and the current state are known. `foreign/moments.py` also calls
these checks.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, optim

from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.checkpoint.state.tensor_checks import (
    Kind,
    OwnStorage,
    Where,
    check_mapping,
    check_tensor,
    described,
    is_number,
    one_number,
    whole_number,
)
from forgather.ml.checkpoint.state.update_precision import PRECISION_KEYS, check_precision_entry

# State keys of unknown optimizers with one element per element of the parameter. Used only if the shape of the
# parameter is not recorded.
_ELEMENTWISE_STATE = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "variance", "sum", "ax"}
)

_OPTIMIZER = Where("the saved optimizer state", "optimizer")

# Other floating dtypes (float8) are storage formats. Optimizers cannot compute in them.
_MOMENT_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
# Options that need a buffer which torch creates only together with a new state: a loaded state must contain it.
_BUFFERS_OF_OPTIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "amsgrad": (("Adam", "AdamW"), "max_exp_avg_sq"),
    "centered": (("RMSprop",), "grad_avg"),
    "momentum": (("RMSprop",), "momentum_buffer"),
}


@dataclass(frozen=True)
class StateKeys:
    """State keys of a torch optimizer for one parameter: elementwise tensors, and single numbers."""

    elementwise: frozenset[str] = frozenset()
    numbers: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    """Keys in `elementwise` that only some options need, or that may be None."""

    @property
    def required(self) -> frozenset[str]:
        return (self.elementwise | self.numbers) - self.optional


def _keys(elementwise: str, numbers: str = "step", optional: str = "") -> StateKeys:
    parts = [frozenset(text.split()) for text in (elementwise, numbers, optional)]
    return StateKeys(parts[0] | parts[2], parts[1], parts[2])


_FACTORS = "row_var col_var variance"
_TORCH_KEYS: dict[type, StateKeys] = {
    optim.Adam: _keys("exp_avg exp_avg_sq", optional="max_exp_avg_sq"),  # Also AdamW, a subclass.
    optim.NAdam: _keys("exp_avg exp_avg_sq", "step mu_product"),
    optim.RAdam: _keys("exp_avg exp_avg_sq"),
    optim.Adamax: _keys("exp_avg exp_inf"),
    optim.Adadelta: _keys("square_avg acc_delta"),
    optim.Adagrad: _keys("sum"),
    optim.ASGD: _keys("ax", "step eta mu"),
    optim.RMSprop: _keys("square_avg", optional="momentum_buffer grad_avg"),
    optim.Rprop: _keys("prev step_size"),
    optim.SGD: _keys("", "", optional="momentum_buffer"),
    optim.Adafactor: _keys("", optional=_FACTORS),
    optim.Muon: _keys("momentum_buffer", ""),
    optim.SparseAdam: _keys("exp_avg exp_avg_sq"),
}


def torch_keys(optimizer: object) -> StateKeys | None:
    """Return the state keys of an optimizer that is, derives from or wraps a torch optimizer; None for others."""
    for one in _unwrapped(optimizer):
        for ancestor in type(one).__mro__:
            if ancestor in _TORCH_KEYS:
                return _TORCH_KEYS[ancestor]
    return None


def is_fused(optimizer: object, options: Mapping[str, Any], key: object) -> bool:
    """Return whether a fused kernel of torch reads this state and assumes the dtype and layout of the parameter."""
    keys = torch_keys(optimizer) if options.get("fused") else None
    return keys is not None and key in keys.elementwise


def is_of_torch(optimizer: object) -> bool:
    """Return whether the optimizer is exactly a class of torch; a subclass may omit some of the state."""
    return type(optimizer) in _TORCH_KEYS or type(optimizer) is optim.AdamW


def with_number_tensors(saved: Mapping[str, Any], optimizer: object) -> Mapping[str, Any]:
    """Return the state with its counts as tensors, which torch requires; older versions saved plain numbers."""
    # SparseAdam still counts its steps in a plain int.
    if not is_of_torch(optimizer) or isinstance(optimizer, optim.SparseAdam):
        return saved
    keys = _TORCH_KEYS[optim.Adam if type(optimizer) is optim.AdamW else type(optimizer)]
    # The dtype that torch itself uses for step counts: float64 if that is the default dtype, else float32.
    dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
    return {
        key: torch.tensor(float(value), dtype=dtype) if key in keys.numbers and is_number(value) else value
        for key, value in saved.items()
    }


def _unwrapped(optimizer: object) -> Iterator[Any]:
    """Yield the optimizer and the optimizers that it wraps, by the attribute names of torch and Accelerate."""
    # The limit ends the loop for a wrapper that refers to itself.
    for _ in range(10):
        yield optimizer
        inner = getattr(optimizer, "optim", None) or getattr(optimizer, "optimizer", None)
        if not isinstance(inner, optim.Optimizer):
            return
        optimizer = inner


# --- structure


def check_structure(state_dict: object) -> None:
    """Raise `CheckpointLoadError` unless a loaded value has the structure and types of an optimizer state."""
    parts = check_mapping(state_dict, _OPTIMIZER)
    if "state" not in parts or "param_groups" not in parts:
        raise CheckpointLoadError(
            f"Not an optimizer state: it has {sorted(map(described, parts))} instead of state and param_groups."
        )
    _check_groups(parts["param_groups"], parts.get("initial_options"))
    for name, state in check_mapping(parts["state"], _OPTIMIZER.at("state")).items():
        check_mapping(state, Where(f"optimizer state of {name!r}", "optimizer"))
    for name, record in check_mapping(parts.get("parameters", {}), _OPTIMIZER.at("parameters")).items():
        _check_record(record, _OPTIMIZER.at(f"parameters[{name!r}]"))
    _check_completeness(parts)


def _check_completeness(parts: Mapping[str, Any]) -> None:
    """Reject states of parameters outside the param_groups, and states with keys other than the recorded keys."""
    names = {name for group in parts["param_groups"] for name in group["params"]}
    for name in parts["state"]:
        if name not in names:
            raise _OPTIMIZER.at("state").refusal(f"has the entry {described(name)}", "parameters of its param_groups")
    # States of other programs may have no records, so these comparisons are skipped for them.
    records = parts.get("parameters", {})
    if records and (missing := sorted(names - records.keys())):
        raise _OPTIMIZER.at("parameters").refusal(f"lacks {missing[0]!r}", "every parameter of its param_groups")
    for name, record in records.items():
        found = state_keys(parts["state"].get(name))
        if record.get("state", found) != found:
            where = Where(f"optimizer state of {name!r}", "optimizer")
            raise where.refusal(f"has {found}", f"{record['state']}, as it was saved")


def state_keys(state: Mapping[Any, Any] | None) -> list[str]:
    """Return the sorted state keys of a parameter, in the form recorded under `parameters`."""
    return sorted(map(str, state or ()))


def _check_groups(groups: object, configured: object) -> None:
    where = _OPTIMIZER.at("param_groups")
    for number, group in enumerate(_listed(groups, where)):
        place = _OPTIMIZER.at(f"param_groups[{number}]")
        _check_names(check_mapping(group, place).get("params"), place.at("params"))
        _check_options({option: value for option, value in group.items() if option != "params"}, place)
    where = _OPTIMIZER.at("initial_options")
    origins = [] if configured is None else _listed(configured, where)
    if origins and len(origins) != len(_listed(groups, where)):
        raise where.refusal(
            f"has {len(origins)} entries", f"{len(_listed(groups, where))}, one for each of param_groups"
        )
    for number, origin in enumerate(origins):
        place = _OPTIMIZER.at(f"initial_options[{number}]")
        options = {} if origin is None else check_mapping(origin, place)
        _check_options(options, place)
        if missing := sorted(str(option) for option in options if option not in _listed(groups, where)[number]):
            raise _OPTIMIZER.at(f"param_groups[{number}]").refusal(
                f"lacks {missing[0]!r}", "all of its initial_options"
            )


def _listed(value: object, where: Where) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise where.refusal(f"is {described(value)}", "a list")
    return value


def _check_names(names: object, where: Where) -> None:
    listed = _listed(names, where)
    # Indices depend on the order of the parameters, so they cannot be matched with names.
    if listed and all(type(name) is int for name in listed):
        raise CheckpointLoadError(
            "The saved optimizer state has none of this optimizer's parameters: it has parameter indices instead of names, "
            "like state dicts of torch. Save the optimizer with OptimizerState, or skip the optimizer component to start "
            "it fresh."
        )
    for name in listed:
        if not isinstance(name, str):
            raise where.refusal(f"has the entry {described(name)}", "names of parameters")


def _check_options(options: Mapping[str, Any], where: Where) -> None:
    for option, value in options.items():
        _check_plain(value, where.at(option))


def _check_plain(value: object, where: Where) -> None:
    """Reject options of types that no optimizer has; `check_option` checks user-defined classes against the group."""
    if isinstance(value, Tensor):
        check_tensor(value, where, any_order=True)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            _check_plain(inner, where.at(described(key)))
    elif isinstance(value, list | tuple):
        _check_sequence(value, where)
        for number, inner in enumerate(value):
            _check_plain(inner, where.at(number))
    elif isinstance(value, np.ndarray):
        raise where.refusal(f"is {described(value)}", "a number, text, list or tensor")


def _check_sequence(value: Sequence[Any], where: Where) -> None:
    # Loading rebuilds sequences as `type(value)(items)`. Named tuples take their fields as separate arguments instead.
    if type(value) not in (list, tuple, torch.Size):
        raise where.refusal(f"is {described(value)}", "a list or tuple")


def _check_record(record: object, where: Where) -> None:
    fields = check_mapping(record, where)
    for size in _listed(fields.get("shape"), where.at("shape")):
        whole_number(size, where.at("shape"), least=0)
    for field in ("dtype", "optimizer"):
        if not isinstance(fields.get(field), str):
            raise where.at(field).refusal(f"is {described(fields.get(field))}", "a name")
    for key in _listed(fields.get("state", []), where.at("state")):
        if not isinstance(key, str):
            raise where.at("state").refusal(f"has the entry {described(key)}", "names of values")


# --- options that will be restored


def check_option(option: str, value: object, current: object, group: object) -> None:
    """Check that a saved option can replace the current option of the group: a number for a number, and so on."""
    where = Where(f"optimizer option of {group}", "optimizer").at(option)
    if isinstance(current, Tensor):
        _check_tensor_option(value, current, where)
    elif isinstance(current, bool):
        _require(isinstance(value, bool), value, "True or False", where)
    elif is_number(current):
        _check_number_option(value, where)
    elif isinstance(current, str):
        _require(value is None or isinstance(value, str), value, "a text", where)
    elif isinstance(current, list | tuple):
        is_like = isinstance(value, list | tuple) and len(value) == len(current)
        _require(is_like, value, f"a sequence of {len(current)}", where)
        for number, (inner, mine) in enumerate(zip(value, current, strict=True)):  # type: ignore[call-overload]
            check_option(f"{option}[{number}]", inner, mine, group)
    elif current is not None:
        _require(type(value) is type(current), value, f"of type {type(current).__name__}", where)


def _check_tensor_option(value: object, current: Tensor, where: Where) -> None:
    if isinstance(value, Tensor) and current.numel() != 1:
        check_tensor(value, where, shape=current.shape, any_order=True)
    else:
        _check_number_option(value, where)


def _check_number_option(value: object, where: Where) -> None:
    if isinstance(value, Tensor):
        check_tensor(value, where, kind="real", any_order=True)
        if value.numel() != 1:
            raise where.refusal(f"has shape {tuple(value.shape)}", "one number")
    else:
        _require(is_number(value), value, "a number", where)


def _require(fits: bool, value: object, expected: str, where: Where) -> None:
    if not fits:
        raise where.refusal(f"is {described(value)}", expected)


# --- state of one parameter


class StateChecks:
    """Checks of all parameter states of an optimizer; `finish` checks that their tensors share no memory."""

    def __init__(self) -> None:
        self._own = OwnStorage()
        self._of_parameter: set[tuple[int, int]] = set()

    def check(
        self, name: str, saved: Mapping[str, Any], parameter: Tensor, optimizer: object, existing: Mapping[str, Any]
    ) -> None:
        """Check the saved state of a parameter; `existing` is its current state in the optimizer."""
        where = Where(f"optimizer state of {name!r}", "optimizer")
        # A tensor may appear twice only in the state of one parameter.
        self._of_parameter.clear()
        keys = torch_keys(optimizer) or StateKeys()
        if is_of_torch(optimizer):
            _require_keys(saved, _required(keys, parameter), where)
        for key, value in saved.items():
            place = where.at(key)
            if key in keys.elementwise:
                self._check_elementwise(key, value, parameter, keys, place)
            elif key in keys.numbers:
                self._check_number(key, value, place, is_of_torch(optimizer))
            elif key in PRECISION_KEYS:
                if (tensor := check_precision_entry(key, value, parameter, place)) is not None:
                    self._own.add(tensor, place)
            else:
                self._check_foreign(key, value, parameter, existing.get(key), place)

    def finish(self) -> None:
        self._own.check()

    def _check_elementwise(self, key: str, value: object, parameter: Tensor, keys: StateKeys, where: Where) -> None:
        if value is None and key in keys.optional:
            return
        kind: Kind = "complex" if parameter.is_complex() else "floating"
        shape = _state_shape(key, parameter, is_factored=_FACTORS.split()[0] in keys.elementwise)
        tensor = check_tensor(value, where, shape=shape, kind=kind, like=parameter)
        if tensor.is_floating_point() and tensor.dtype not in _MOMENT_DTYPES:
            raise where.refusal(f"has dtype {tensor.dtype}", "a dtype that optimizers can compute in")
        self._own.add(tensor, where)

    def _check_number(self, key: object, value: object, where: Where, is_of_torch: bool) -> None:
        one_number(value, where, at_least=0.0 if key == "step" else -math.inf)
        if isinstance(value, Tensor):
            if is_of_torch and key == "step" and value.ndim:
                raise where.refusal(f"has shape {tuple(value.shape)}", "a scalar without dimensions")
            self._own.add(value, where)

    def _check_foreign(self, key: object, value: object, parameter: Tensor, existing: object, where: Where) -> None:
        """Check a state entry of unknown meaning: its memory layout, and its shape against the current entry."""
        if isinstance(value, Tensor):
            shape = existing.shape if isinstance(existing, Tensor) and existing.numel() else None
            tensor = check_tensor(value, where, shape=shape, like=parameter, any_order=True)
            extent = (tensor.data_ptr(), tensor.nbytes)
            if extent not in self._of_parameter:
                # Two entries of the same parameter may be the same tensor, if the optimizer has stored it twice.
                self._of_parameter.add(extent)
                self._own.add(tensor, where)
        if key == "step" and (is_number(value) or (isinstance(value, Tensor) and value.numel() == 1)):
            one_number(value, where, at_least=0.0)
        if isinstance(value, Mapping):
            inner = existing if isinstance(existing, Mapping) else {}
            for inner_key, one in value.items():
                self._check_foreign(inner_key, one, parameter, inner.get(inner_key), where.at(inner_key))
        if isinstance(value, list | tuple):
            _check_sequence(value, where)
            for number, one in enumerate(value):
                self._check_foreign(None, one, parameter, None, where.at(number))


def check_buffers_of_options(state_dict: Mapping[str, Any]) -> None:
    """Reject options of torch optimizers that need a buffer missing from the state: the first step would fail."""
    records = state_dict.get("parameters", {})
    for group in state_dict["param_groups"]:
        for option, (classes, buffer) in _BUFFERS_OF_OPTIONS.items():
            value = group.get(option)
            if value is not True and not (option == "momentum" and is_number(value) and value > 0):
                continue
            for name in group["params"]:
                saved = state_dict["state"].get(name)
                if saved and records.get(name, {}).get("optimizer") in classes and buffer not in saved:
                    where = Where(f"optimizer state of {name!r}", "optimizer")
                    raise where.refusal(f"lacks {buffer}", f"it, because option {option} is set")


def _required(keys: StateKeys, parameter: Tensor) -> frozenset[str]:
    if "row_var" not in keys.elementwise:
        return keys.required
    # Adafactor factors the second moment of tensors with two or more dimensions only.
    return keys.required | ({"row_var", "col_var"} if parameter.ndim > 1 else {"variance"})


def _require_keys(saved: Mapping[str, Any], required: frozenset[str], where: Where) -> None:
    # The state of a parameter without a gradient so far is empty.
    if saved and (missing := sorted(required - saved.keys())):
        raise where.refusal(f"has {sorted(saved)}", f"{', '.join(missing)} as well")


def _state_shape(key: str, parameter: Tensor, is_factored: bool) -> tuple[int, ...]:
    """Return the expected shape of a state; Adafactor averages over one of the last two dimensions."""
    shape = list(parameter.shape)
    if is_factored and key in ("row_var", "col_var") and len(shape) > 1:
        shape[-1 if key == "row_var" else -2] = 1
    return tuple(shape)


def saved_shapes(record: Mapping[str, Any] | None, state: Mapping[str, Any]) -> set[tuple[int, ...]]:
    """Return the shapes that a parameter may have had when its state was saved; an empty set fits every shape.

    Optimizers choose the shapes of their state (factored, quantised, low rank), so only the recorded shape is reliable.
    Without a record, the shapes of elementwise state are used.
    """
    if record is not None:
        return {tuple(record["shape"])} if state else set()
    elementwise = [value for key, value in state.items() if key in _ELEMENTWISE_STATE and isinstance(value, Tensor)]
    return {tuple(value.shape) for value in elementwise if value.ndim > 0}
