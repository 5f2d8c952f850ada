"""Values of every kind of class that a state may hold, for the tests of the codec."""

import collections
import dataclasses
import enum
import io
from typing import Any, NamedTuple

import torch

from forgather.ml.checkpoint.codec import decode_state, encode_state


def through_file(state: Any) -> Any:
    """The state after a real save and a load that accepts no code."""
    buffer = io.BytesIO()
    torch.save(encode_state(state), buffer)
    buffer.seek(0)
    return decode_state(torch.load(buffer, weights_only=True))


class Color(enum.Enum):
    RED = "red"
    BLUE = (1, 2)


class Level(enum.IntEnum):
    LOW = 1


class Word(enum.StrEnum):
    YES = "yes"


class Access(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


class Mode(enum.IntFlag):
    A = 1
    B = 2


class Point(NamedTuple):
    x: int
    y: Any


class Labelled(collections.namedtuple("Labelled", ["name", "value"])):
    __slots__ = ()


@dataclasses.dataclass
class Record:
    count: int
    items: list[Any] = dataclasses.field(default_factory=list)

    class Kind(enum.Enum):
        NESTED = 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any


@dataclasses.dataclass(slots=True)
class Slotted:
    value: Any
    other: int = 5


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlotted:
    value: Any
