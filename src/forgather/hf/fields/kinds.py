"""Kinds of rows in the field map: the effect of a field of `transformers.TrainingArguments` in Forgather.

`Same` and `Mapped` fields have an effect, `NoEffect` fields are logged once if they were set, and `Refused` fields raise
ValueError if they were set. `field_map` holds the rows, and `engine_arguments` applies them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Convert = Callable[[Any], Mapping[str, Any]]
"""Returns values of our arguments from an object of `transformers.TrainingArguments`."""


@dataclass(frozen=True)
class Same:
    """Field with the same meaning. The engine has it under the same name, unless `engine` is False."""

    note: str = ""
    engine: bool = True

    @property
    def description(self) -> str:
        return self.note


@dataclass(frozen=True)
class Mapped:
    """Field that sets other arguments of Forgather."""

    target: str
    convert: Convert
    note: str = ""

    @property
    def description(self) -> str:
        return f"{self.target}. {self.note}" if self.note else self.target


@dataclass(frozen=True)
class NoEffect:
    """Field without an effect. A log line says so once if the field was set."""

    reason: str

    @property
    def description(self) -> str:
        return self.reason


@dataclass(frozen=True)
class Refused:
    """Field that raises ValueError if it was set, unless `accepts` returns True for its value."""

    reason: str
    remedy: str
    accepts: Callable[[Any], bool] | None = None

    @property
    def description(self) -> str:
        return f"{self.reason} {self.remedy}"


Row = Same | Mapped | NoEffect | Refused
