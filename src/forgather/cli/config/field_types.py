"""Whether a value fits the declared type of a field, and how to name that type to people."""

import copy
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser


def fitting(hint: object, value: object) -> object:
    """The value in the type of the field; `ValueError` when it cannot be one."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=hint)
    try:
        # A copy, because the parser changes what is inside of mappings.
        fitted = parser.parse_object({"value": copy.deepcopy(value)})["value"]
    except ArgumentError as error:
        raise ValueError(str(error)) from None
    # What is declared as Any is not touched: the parser would make a number of a text that looks like one.
    return value if has_free_values(hint) else fitted


def has_free_values(hint: object) -> bool:
    """Whether values of any type may be inside."""
    if hint is Any or typing.is_typeddict(hint):
        return True
    return any(has_free_values(inner) for inner in typing.get_args(hint))


def is_list(hint: object) -> bool:
    return any((typing.get_origin(option) or option) in (list, Sequence) for option in options_of(hint))


def is_mapping(hint: object) -> bool:
    return any((typing.get_origin(option) or option) is dict for option in options_of(hint))


def options_of(hint: object) -> tuple[object, ...]:
    """The alternatives of a union, or the type alone."""
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def name_of(hint: object) -> str:
    """A type in words: int, float or None, list of str."""
    return " or ".join(_name_of_one(option) for option in options_of(hint))


def _name_of_one(hint: object) -> str:
    if hint is types.NoneType:
        return "None"
    if typing.is_typeddict(hint):
        return "{class_path, init_args}"
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (list, Sequence):
        return f"list of {name_of(inner[0])}"
    if origin in (dict, Mapping):
        return "mapping"
    return str(getattr(hint, "__name__", hint))
