"""Registry of classes that a checkpoint may contain: enums, named tuples and dataclasses.

A checkpoint stores the name of a class. Loading rebuilds only classes that the program has registered, so a file cannot
select an arbitrary class and run its methods on fields from the file. The codec (`encoding/class_values.py`) reads the
registry.
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
    """Register an enum, named tuple or dataclass, so that checkpoints may contain instances; usable as a decorator.

    `name` is the name in the file, by default "module:qualname". Pass a name for a class that may move to another
    module. Fields are loaded unchecked and no constructor runs, so register classes of plain data only. Returns the
    class.
    """
    if cls is None:
        return lambda decorated: register_state_class(decorated, name=name)
    if not isinstance(cls, type) or not (issubclass(cls, enum.Enum) or is_namedtuple(cls) or is_dataclass(cls)):
        raise TypeError(
            f"register_state_class({cls!r}) cannot work: only enums, named tuples and dataclasses can be registered. "
            "Store other objects by their state_dict()."
        )
    reference = default_name(cls) if name is None else name
    if not isinstance(reference, str) or not reference:
        raise ValueError(f"register_state_class(name={name!r}) cannot work: a name must be a non-empty string.")
    # Compared by name, so that a reloaded module can register its new class object again.
    other = _classes.get(reference)
    if other is not None and default_name(other) != default_name(cls):
        raise ValueError(
            f"Two classes cannot both be registered as {reference!r}: {default_name(other)} and {default_name(cls)}. "
            "Pass a different name= for one of them."
        )
    _classes[reference] = cls
    # A class registered under several names is read under each of them and written under the last.
    _names[cls] = reference
    return cls


def default_name(cls: type) -> str:
    """Return the default name of a class, "module:qualname"."""
    return f"{cls.__module__}:{cls.__qualname__}"


def registered_name(cls: type) -> str | None:
    """Return the name of a class in files, or None if it is not registered."""
    return _names.get(cls)


def registered_class(reference: object) -> type:
    """Return the class registered as `reference`; raise `UnregisteredClassError` with the line that registers it."""
    found = _classes.get(reference) if isinstance(reference, str) else None
    if found is None:
        raise UnregisteredClassError(_unregistered(reference))
    return found


def remedy_for(module: str, qualname: str) -> str:
    """Return the line of code that registers a class."""
    return (
        f"import {module}, forgather.ml.checkpoint; forgather.ml.checkpoint.register_state_class({module}.{qualname})"
    )


def _unregistered(reference: object) -> str:
    # The reference comes from the file, and the message suggests to run it as code: print plausible names only.
    if not isinstance(reference, str) or not _REFERENCE.fullmatch(reference) or len(reference) > 200:
        return "it contains a value of a class with an invalid name"
    module, _, qualname = reference.partition(":")
    return (
        f"it contains a value of the class {qualname} of module {module}, which is not registered in this process. If this "
        f"is plain data of your own program, add before loading: {remedy_for(module, qualname)}"
    )


def is_namedtuple(cls: type) -> bool:
    """Return whether a class is a named tuple."""
    # Attribute access on the class could run code of its metaclass, so only `vars` is read.
    return issubclass(cls, tuple) and any(isinstance(vars(base).get("_fields"), tuple) for base in cls.__mro__)


def is_dataclass(cls: type) -> bool:
    """Return whether a class or one of its base classes is a dataclass."""
    # For the same reason this does not call `dataclasses.is_dataclass`.
    return any(dataclasses._FIELDS in vars(base) for base in cls.__mro__)  # type: ignore[attr-defined]
