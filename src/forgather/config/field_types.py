"""Type checks of configuration values against dataclass fields, and readable names of types for messages.

jsonargparse does the conversion. Called by `parser` for each value.
"""

import copy
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser


def fitting(hint: object, value: object) -> object:
    """Return the value converted to the field's type; raise `ValueError` if it does not fit."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=hint)
    try:
        # A copy, because jsonargparse changes nested mappings in place.
        fitted = parser.parse_object({"value": copy.deepcopy(value)})["value"]
    except ArgumentError as error:
        raise ValueError(str(error)) from None
    # Values declared as Any stay as they are: jsonargparse would turn a string that looks like a number into a number.
    return value if has_free_values(hint) else fitted


def has_free_values(hint: object) -> bool:
    """Return whether the type allows values of any type inside."""
    if hint is Any or typing.is_typeddict(hint):
        return True
    return any(has_free_values(inner) for inner in typing.get_args(hint))


def is_list(hint: object) -> bool:
    return any((typing.get_origin(option) or option) in (list, Sequence) for option in options_of(hint))


def is_mapping(hint: object) -> bool:
    return any((typing.get_origin(option) or option) is dict for option in options_of(hint))


def options_of(hint: object) -> tuple[object, ...]:
    """Return the members of a union, or the type itself."""
    # A union with a Literal is a typing.Union.
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    return typing.get_args(hint) if is_union else (hint,)


def name_of(hint: object) -> str:
    """Return a type in words: int, float or None, list of str."""
    return " or ".join(_name_of_one(option) for option in options_of(hint))


def _name_of_one(hint: object) -> str:
    if hint is types.NoneType:
        return "None"
    if typing.is_typeddict(hint):
        return "{class_path, init_args}"
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(map(repr, inner))
    if origin in (list, Sequence):
        return f"list of {name_of(inner[0])}"
    if origin in (dict, Mapping):
        return "mapping"
    return str(getattr(hint, "__name__", hint))
