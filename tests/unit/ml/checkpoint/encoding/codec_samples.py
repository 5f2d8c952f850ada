"""Sample values of every kind of class that a state may hold, for the codec tests."""

import collections
import dataclasses
import enum
import os
import tempfile
from typing import Any, NamedTuple

import torch

from forgather.ml.checkpoint import register_state_class
from forgather.ml.checkpoint.encoding.codec import encode_state
from forgather.ml.checkpoint.files.hashed_io import HashingWriter
from forgather.ml.checkpoint.files.state_files import read_state, write_state


def through_file(state: Any) -> Any:
    """Save and load `state` through a real file, and check that `torch.load` accepts the file."""
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "state.pt")
        with HashingWriter(path) as writer:
            write_state(writer, encode_state(state))
        torch.load(path, weights_only=True)
        return read_state(path)


@register_state_class
class Color(enum.Enum):
    RED = "red"
    BLUE = (1, 2)


@register_state_class
class Level(enum.IntEnum):
    LOW = 1


@register_state_class
class Word(enum.StrEnum):
    YES = "yes"


@register_state_class
class Access(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


@register_state_class
class Mode(enum.IntFlag):
    A = 1
    B = 2


@register_state_class
class Point(NamedTuple):
    x: int
    y: Any


@register_state_class
class Labelled(collections.namedtuple("Labelled", ["name", "value"])):
    __slots__ = ()


@register_state_class
@dataclasses.dataclass
class Record:
    count: int
    items: list[Any] = dataclasses.field(default_factory=list)

    @register_state_class
    class Kind(enum.Enum):
        NESTED = 1


@register_state_class
@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any


@register_state_class
@dataclasses.dataclass(slots=True)
class Slotted:
    value: Any
    other: int = 5


@register_state_class
@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlotted:
    value: Any
