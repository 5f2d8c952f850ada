"""Registry of classes whose instances a checkpoint may hold: enums, named tuples and dataclasses.

A checkpoint can only name a class. Only a class that the program itself has registered is ever rebuilt, so a file
cannot choose one whose methods do something else with the fields that the file gives it.
"""

import dataclasses
import enum
import re
from collections.abc import Callable
from typing import TypeVar, overload

from forgather.ml.checkpoint.errors import UnregisteredClassError

T = TypeVar("T", bound=type)

_classes: dict[str, type] = {}
_names: dict[type, str] = {}
_REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@overload
def register_state_class(cls: T, *, name: str | None = None) -> T: ...
@overload
def register_state_class(cls: None = None, *, name: str | None = None) -> Callable[[T], T]: ...
def register_state_class(cls: T | None = None, *, name: str | None = None) -> T | Callable[[T], T]:
    """Allow checkpoints to hold instances of an enum, named tuple or dataclass; returns the class, so it decorates too.

    `name` is what files call it, by default "module:qualname". Give a name to a class that may move to another module.
    Fields come from the file unchecked and no constructor runs: register classes of plain data only.
    """
    if cls is None:
        return lambda decorated: register_state_class(decorated, name=name)
    if not isinstance(cls, type) or not (issubclass(cls, enum.Enum) or is_namedtuple(cls) or is_dataclass(cls)):
        raise TypeError(
            f"register_state_class({cls!r}) cannot work: a checkpoint holds instances of enums, named tuples and "
            "dataclasses only. Store other objects by their state_dict()."
        )
    reference = default_name(cls) if name is None else name
    if not isinstance(reference, str) or not reference:
        raise ValueError(f"register_state_class(name={name!r}) cannot work: a name is text that is not empty.")
    other = _classes.get(reference)
    if other is not None and default_name(other) != default_name(cls):
        raise ValueError(
            f"Two classes cannot both be registered as {reference!r}: {default_name(other)} and {default_name(cls)}. "
            "Give one of them another name=."
        )
    _classes[reference] = cls
    # A class that was registered under several names is read under all of them and written under the last.
    _names[cls] = reference
    return cls


def default_name(cls: type) -> str:
    """The name of a class that was registered without one."""
    return f"{cls.__module__}:{cls.__qualname__}"


def registered_name(cls: type) -> str | None:
    """What files call a class; None for one that is not registered."""
    return _names.get(cls)


def registered_class(reference: object) -> type:
    """The class that files call `reference`; `UnregisteredClassError` says which line makes it known."""
    found = _classes.get(reference) if isinstance(reference, str) else None
    if found is None:
        raise UnregisteredClassError(_unregistered(reference))
    return found


def remedy_for(module: str, qualname: str) -> str:
    """The line that registers a class."""
    return (
        f"import {module}, forgather.ml.checkpoint; forgather.ml.checkpoint.register_state_class({module}.{qualname})"
    )


def _unregistered(reference: object) -> str:
    if not isinstance(reference, str) or not _REFERENCE.fullmatch(reference) or len(reference) > 200:
        return "it holds a value of a class with a malformed name"
    module, _, qualname = reference.partition(":")
    return (
        f"it holds a value of the class {qualname} of module {module}, which is not registered in this process. If it is "
        f"plain data of your own program, add before loading: {remedy_for(module, qualname)}"
    )


def is_namedtuple(cls: type) -> bool:
    """Whether a class is a named tuple, by what it holds itself: asking it could run code of its metaclass."""
    return issubclass(cls, tuple) and any(isinstance(vars(base).get("_fields"), tuple) for base in cls.__mro__)


def is_dataclass(cls: type) -> bool:
    """Whether a class, or one it derives from, is a dataclass."""
    return any(dataclasses._FIELDS in vars(base) for base in cls.__mro__)  # type: ignore[attr-defined]
