"""Converters for instances of registered enum, named tuple and dataclass classes, to and from plain data.

Rebuilding calls no constructor, property or `__post_init__`. The registry is in `state_classes`. `converters` adds
these converters to the codec.
"""

import dataclasses
import enum
import types
from collections.abc import Callable
from typing import Any

from forgather.ml.checkpoint.errors import StateDecodingError
from forgather.ml.checkpoint.state.state_classes import (
    is_dataclass,
    is_namedtuple,
    registered_class,
    registered_name,
    remedy_for,
)

Parts = dict[str, Any]


class UnsupportedValueError(Exception):
    """A value has a supported type but cannot be stored; the message gives the reason and the fix."""


@dataclasses.dataclass(frozen=True)
class Converter:
    """Pair of functions that split one kind of value into named parts and rebuild it.

    Parts may hold any supported value. `tag` identifies the kind in the file.
    """

    tag: str
    to_parts: Callable[[Any], Parts]
    from_parts: Callable[[Parts], Any]


def _reference_to(cls: type) -> str:
    name = registered_name(cls)
    if name is None:
        raise UnsupportedValueError(
            "is of an unregistered class, and only registered classes can be restored; add "
            f"{remedy_for(cls.__module__, cls.__qualname__)}, or store its fields in a dict"
        )
    return name


def _resolve(reference: object, kind: str, fits: Callable[[type], bool]) -> Any:
    cls = registered_class(reference)
    # The program may have turned the class into another kind since the save, for example a dataclass into an enum.
    if not fits(cls):
        raise StateDecodingError(
            f"{reference!r} is a {kind} in the checkpoint, but not in this program; "
            "load with the version of the code that wrote the checkpoint"
        )
    return cls


def _fields(parts: Parts) -> dict[str, Any]:
    fields = parts["fields"]
    if type(fields) is not dict or not all(type(name) is str for name in fields):
        raise StateDecodingError("its fields are not a dict with names as keys")
    return fields


def _enum_parts(member: enum.Enum) -> Parts:
    cls = type(member)
    # A pseudo-member made by `_missing_` has no name to look it up by when loading.
    if cls.__members__.get(member._name_) is not member:
        raise UnsupportedValueError("is not a member of its enum; store its value instead")
    return {"class": _reference_to(cls), "name": member._name_}


def _build_enum(parts: Parts) -> enum.Enum:
    cls = _resolve(parts["class"], "enum", lambda found: issubclass(found, enum.Enum))
    # By name and not by `cls(value)`, which could run the class's `_missing_`.
    member: enum.Enum | None = cls.__members__.get(parts["name"]) if type(parts["name"]) is str else None
    if member is None:
        raise StateDecodingError(f"enum {parts['class']!r} has no member {parts['name']!r} any more")
    return member


def _flag_parts(flags: enum.Flag) -> Parts:
    # By value, because a combination of flags is not in `__members__`.
    return {"class": _reference_to(type(flags)), "value": int(flags._value_)}


def _build_flag(parts: Parts) -> enum.Flag:
    cls = _resolve(parts["class"], "flag enum", lambda found: issubclass(found, enum.Flag))
    value = parts["value"]
    if type(value) is not int:
        raise StateDecodingError("the value of a flag enum is not an integer")
    known: enum.Flag | None = vars(cls)["_value2member_map_"].get(value)
    # The standard library's own `_missing_` combines members. Calling the class could run an override of it.
    member: enum.Flag = known if known is not None else enum.Flag._missing_.__func__(cls, value)  # type: ignore[attr-defined]
    if type(member) is not cls:
        raise StateDecodingError(f"flag enum {parts['class']!r} has no combination {value!r} any more")
    return member


def _namedtuple_parts(value: Any) -> Parts:
    if getattr(value, "__dict__", None):
        raise UnsupportedValueError("has attributes besides its fields; store them separately")
    return {"class": _reference_to(type(value)), "fields": dict(zip(value._fields, tuple(value), strict=True))}


def _build_namedtuple(parts: Parts) -> object:
    cls = _resolve(parts["class"], "named tuple", is_namedtuple)
    fields = _fields(parts)
    if set(fields) != set(cls._fields):
        raise StateDecodingError(
            f"named tuple {parts['class']!r} has the fields {list(cls._fields)} but the checkpoint has {list(fields)}"
        )
    # Not `cls(...)`: a subclass may override `__new__`.
    return tuple.__new__(cls, [fields[name] for name in cls._fields])


def _slots(cls: type) -> dict[str, Any]:
    # Base classes first, so that a slot of a subclass replaces a slot of the same name in a base.
    return {
        name: descriptor
        for base in reversed(cls.__mro__)
        for name, descriptor in vars(base).items()
        if isinstance(descriptor, types.MemberDescriptorType)
    }


def _dataclass_parts(value: object) -> Parts:
    cls = type(value)
    # Try the call that rebuilding makes. It rejects subclasses of dict, int, ...: fail at save rather than at load.
    try:
        object.__new__(cls)
    except TypeError:
        raise UnsupportedValueError("is a dataclass that extends a built-in type; store its fields in a dict") from None
    # Read the raw storage, not the declared fields: a field that is a property computes its value, which would be
    # lost or stored twice.
    fields = dict(getattr(value, "__dict__", {}))
    for name, slot in _slots(cls).items():
        try:
            fields[name] = slot.__get__(value, cls)
        except AttributeError:
            continue  # The slot was never assigned.
    return {"class": _reference_to(cls), "fields": fields}


def _build_dataclass(parts: Parts) -> object:
    cls = _resolve(parts["class"], "dataclass", is_dataclass)
    slots = _slots(cls)
    value = object.__new__(cls)
    attributes = getattr(value, "__dict__", None)
    fields = {**_defaults(cls, parts), **_fields(parts)}
    for name, content in fields.items():
        # Not setattr: it would run property setters and fail for frozen classes.
        if name in slots:
            slots[name].__set__(value, content)
        elif attributes is not None:
            attributes[name] = content
        else:
            raise StateDecodingError(f"dataclass {parts['class']!r} has no field {name!r} any more")
    return value


def _defaults(cls: Any, parts: Parts) -> Parts:
    """Return default values of the fields that were added to the class after the save.

    A `default_factory` does not count as a default: calling it would run code.
    """
    defaults = {}
    for field in dataclasses.fields(cls):
        # Properties have no storage. Fields with init=False are set by `__post_init__`, which does not run here.
        if field.name in parts["fields"] or isinstance(vars(cls).get(field.name), property) or not field.init:
            continue
        if field.default is dataclasses.MISSING:
            raise StateDecodingError(
                f"dataclass {parts['class']!r} has a field {field.name!r} that the checkpoint lacks; give it a default"
            )
        defaults[field.name] = field.default
    return defaults


ENUM = Converter("enum", _enum_parts, _build_enum)
FLAG = Converter("flag", _flag_parts, _build_flag)
NAMEDTUPLE = Converter("namedtuple", _namedtuple_parts, _build_namedtuple)
DATACLASS = Converter("dataclass", _dataclass_parts, _build_dataclass)


def find_class_converter(cls: type) -> Converter | None:
    """Return the converter for instances of an enum, named tuple or dataclass, or None for any other class."""
    if issubclass(cls, enum.Enum):
        return FLAG if issubclass(cls, enum.Flag) else ENUM
    if is_namedtuple(cls):
        return NAMEDTUPLE
    if is_dataclass(cls):
        return DATACLASS
    return None
