"""Schemas for the states of built-in components: type and range checks before a checkpoint is applied.

A check is a function that raises `Violation` for a wrong value. Containers add the key to the path of the violation,
and `Schema.check` converts it into a `CheckpointLoadError` that names the full path. The trainer, its callbacks, the
data loaders and the manifest define their schemas with it.
"""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from forgather.ml.checkpoint.errors import CheckpointLoadError

Check = Callable[[Any], None]

# Torch and NumPy store integers in 64 bits.
_MAX_COUNT = 2**63 - 1
# Amounts are added to floats, and larger integers do not fit a float.
_MAX_AMOUNT_BITS = 1000
# Limit of the recursion in `plain`, because a file may nest containers deeper than the stack of Python allows.
_MAX_DEPTH = 64
_MAX_SHOWN = 60


class Violation(Exception):
    """Value that violates a schema; `path` grows from the inside out."""

    def __init__(self, expected: str, value: object, path: Iterable[Any] = ()) -> None:
        super().__init__(expected)
        self.expected = expected
        self.found = described(value)
        self.path = list(path)

    def below(self, key: object) -> "Violation":
        self.path.insert(0, key)
        return self

    def message(self, root: str) -> str:
        key = ".".join([root, *map(_shown_key, self.path)])
        return f"{key} in the checkpoint is {self.found}, but should be {self.expected}"


def described(value: Any) -> str:
    """Return a short description of a value for a message."""
    # The content may be long, and the `repr` of an unknown class could run arbitrary code. So only exact built-in types
    # are printed.
    kind = type(value)
    if kind is str:
        return f"the text {value[:_MAX_SHOWN]!r}" + (
            f"... of {len(value)} characters" if len(value) > _MAX_SHOWN else ""
        )
    if kind is int and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    if kind in (int, float, bool, type(None)):
        return repr(value)
    if kind is Tensor:
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype} on {value.device}"
    if kind in (list, tuple, dict):
        return f"a {kind.__name__} of {len(value)}"
    return f"a value of type {kind.__module__}.{kind.__qualname__}"


def refusal(violation: Violation, root: str, remedy: str | None = None) -> CheckpointLoadError:
    """Return the error for a violation in the component `root`; `remedy` replaces the advice to skip the component."""
    component = root.partition(".")[0]
    if remedy is None:
        remedy = f'or start this part fresh with skip_checkpoint_components=["{component}"]'
    return CheckpointLoadError(
        f"{violation.message(root)}. Nothing of it was loaded. Choose another checkpoint, {remedy}."
    )


def checked(check: Check, value: object, root: str, remedy: str | None = None) -> None:
    """Check a value at the path `root`; raise a `CheckpointLoadError` that names the path of a violation."""
    try:
        check(value)
    except Violation as violation:
        # The traceback of the violation only shows the nesting of the checks, which the path already names.
        raise refusal(violation, root, remedy) from None


# --- single values


def that(expected: str, holds: Callable[[Any], bool]) -> Check:
    """Return a check from a predicate and a description of the expected value."""

    def check(value: object) -> None:
        if not holds(value):
            raise Violation(expected, value)

    return check


# Types are compared exactly: a bool is not accepted as an int, and a subclass could override any operator.


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_COUNT


def _is_number(value: object) -> bool:
    return type(value) is float or (type(value) is int and value.bit_length() <= 64)


def _is_amount(value: object) -> bool:
    if type(value) is int:
        return value >= 0 and value.bit_length() <= _MAX_AMOUNT_BITS
    return type(value) is float and 0 <= value < math.inf


def _is_plain_name(value: object) -> bool:
    return type(value) is str and value != "" and value[0] != "." and not any(sign in value for sign in "/\\\0")


def _is_inner_path(value: object) -> bool:
    # Rejects absolute paths too: their first part is empty.
    if type(value) is not str or "\0" in value or "\\" in value:
        return False
    return all(name not in ("", os.curdir, os.pardir) for name in value.split("/"))


def _is_real_tensor(value: object) -> bool:
    """Return whether a value is a dense, contiguous tensor of real numbers."""
    # An expanded tensor needs almost no memory in the file, but `tolist` would create every element.
    return (
        type(value) is Tensor
        and value.layout is torch.strided
        and value.device.type != "meta"
        and value.is_contiguous()
        and (value.dtype.is_floating_point or value.dtype in (torch.uint8, torch.int16, torch.int32, torch.int64))
    )


def _is_rate(value: Any) -> bool:
    return _is_number(value) or (_is_real_tensor(value) and value.numel() == 1)


anything: Check = lambda value: None  # noqa: E731
"""Check that accepts any value, for the states of user-defined objects."""
count = that("an integer of 0 or more", _is_count)
positive = that("an integer of 1 or more", lambda value: _is_count(value) and value > 0)
integer = that("an integer of at most 64 bits", lambda value: type(value) is int and value.bit_length() <= 64)
position = that("an integer of -1 or more", lambda value: _is_count(value) or (type(value) is int and value == -1))
flag = that("True or False", lambda value: type(value) is bool)
number = that("a number", _is_number)
amount = that("a finite number of 0 or more", _is_amount)
text = that("text", lambda value: type(value) is str)
rate = that("a number, or a tensor that holds one", _is_rate)
real_vector = that(
    "a tensor of real numbers in one dimension", lambda value: _is_real_tensor(value) and value.ndim == 1
)
relative_name = that("a plain file name, without folders and without a dot in front", _is_plain_name)
relative_path = that("a relative path that stays inside the run", _is_inner_path)


def plain(value: object, depth: int = 0) -> None:
    """Check that a value is data: containers, numbers, text, tensors, registered classes; no callables."""
    if callable(value):
        raise Violation("data, which cannot be called", value)
    if depth > _MAX_DEPTH:
        raise Violation(f"nested at most {_MAX_DEPTH} levels deep", value)
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple, set, frozenset)):
        items = enumerate(value)
    for key, item in items:
        at(key, lambda inner: plain(inner, depth + 1), item)


# --- containers


def at(key: object, check: Check, value: object) -> None:
    """Check a value under `key`; a violation gets the key in its path."""
    try:
        check(value)
    except Violation as violation:
        raise violation.below(key) from None


def require_mapping(value: object) -> None:
    """Check that a value is a dict; its content is not checked."""
    if not isinstance(value, Mapping):
        raise Violation("a dict", value)


def optional(check: Check) -> Check:
    """Return a check that accepts None, or a value that passes `check`."""

    def check_if_any(value: object) -> None:
        if value is None:
            return
        try:
            check(value)
        except Violation as violation:
            # A violation deeper inside is about an entry, and None would not be valid there.
            if not violation.path:
                violation.expected += ", or None"
            raise

    return check_if_any


def list_of(check: Check, length: int | None = None) -> Check:
    """Return a check for a list or tuple of values that pass `check`, with exactly `length` values if it is set."""
    expected = "a list" if length is None else f"a list of {length}"

    def check_list(value: Any) -> None:
        if type(value) not in (list, tuple) or length not in (None, len(value)):
            raise Violation(expected, value)
        for index, item in enumerate(value):
            at(index, check, item)

    return check_list


def list_like(checks: Sequence[Check]) -> Check:
    """Return a check for a list or tuple with one value for each of the checks."""
    whole = list_of(anything, len(checks))

    def check_list(value: Any) -> None:
        whole(value)
        for index, (check, item) in enumerate(zip(checks, value, strict=True)):
            at(index, check, item)

    return check_list


def mapping_of(key_check: Check, check: Check) -> Check:
    """Return a check for a dict: keys must pass `key_check`, and values must pass `check`."""

    def check_mapping(value: Any) -> None:
        require_mapping(value)
        for key, item in value.items():
            at(key, key_check, key)
            at(key, check, item)

    return check_mapping


def every(*checks: Check) -> Check:
    """Return a check that applies all checks in order."""

    def check_all(value: object) -> None:
        for check in checks:
            check(value)

    return check_all


class Schema:
    """Check for a dict with known keys; schemas are checks too, so that they nest.

    For example::

        COUNTERS = Schema({"step": count, "best": optional(number)}, may_lack=["best"])
        COUNTERS.check(state, "trainer")

    A key is required unless `may_lack` contains it, for keys that older versions did not save. Unknown keys are
    ignored, because newer versions may save more. `known` removes them before a state is applied.
    """

    def __init__(self, fields: Mapping[str, Check], may_lack: Iterable[str] = ()) -> None:
        self.fields = dict(fields)
        self._may_lack = frozenset(may_lack)

    def __call__(self, state: Any) -> None:
        require_mapping(state)
        for name, check in self.fields.items():
            if name in state:
                at(name, check, state[name])
            elif name not in self._may_lack:
                raise Violation(f"a dict that has the key {name!r}", state)

    def check(self, state: object, root: str, remedy: str | None = None) -> None:
        """Raise a `CheckpointLoadError` that names the first key below `root` with a wrong value."""
        checked(self, state, root, remedy)

    def known(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of a state with known keys, which may be applied."""
        return {name: state[name] for name in self.fields if name in state}


def _shown_key(key: object) -> str:
    return key[:_MAX_SHOWN] if type(key) is str else described(key)
