"""Observations of the device: host waits, copies, hazards and NCCL calls, each with its source line."""

import contextlib
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.rehearsal.activation import native

KINDS = ("sync", "h2d", "d2h", "hazard")
MAX_FRAMES = 70
_LIBRARY = "/src/forgather/"
_OWN_FOLDER = str(Path(__file__).parent)
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")})


class Observation(NamedTuple):
    """One thing that the device saw."""

    kind: str
    name: str
    num_bytes: int
    where: str
    """The innermost line of forgather, else the innermost outside installed packages."""
    stack: tuple[str, ...]
    """Lines of the stack, innermost last."""


class Record:
    """Observations in order."""

    def __init__(self) -> None:
        self.events: list[Observation] = []

    def __call__(self, kind: str, name: str, num_bytes: int) -> None:
        lines = _stack()
        own = [line for line in lines if _LIBRARY in line]
        outside = [line for line in lines if not line.startswith((*_INSTALLED, "<"))]
        innermost = (own or outside or lines or ["(thread without Python code)"])[-1]
        where = innermost.rpartition(_LIBRARY)[2]
        self.events.append(Observation(kind, name, num_bytes, where, tuple(lines)))

    def count(self, kind: str) -> int:
        """Count the observations of a kind: "sync", "h2d", "d2h", "hazard" or "nccl"."""
        return sum(each.kind == kind for each in self.events)

    def summary(self, *kinds: str) -> Counter[tuple[str, str, str]]:
        """Count observations by kind, name and source line."""
        chosen = kinds or KINDS
        return Counter((each.kind, each.name, each.where) for each in self.events if each.kind in chosen)


def _stack() -> list[str]:
    """Return the Python stack, innermost last."""
    # Frames are read directly, since `traceback` would open the source files.
    lines: list[str] = []
    frame = sys._getframe(1).f_back
    while frame is not None and len(lines) < MAX_FRAMES:
        code = frame.f_code
        if not code.co_filename.startswith(_OWN_FOLDER):
            lines.append(f"{code.co_filename}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    lines.reverse()
    return lines


@contextlib.contextmanager
def watching() -> Iterator[Record]:
    """Record the device in this process while the block runs, in all of its threads."""
    record = Record()
    native().watch(record)
    try:
        yield record
    finally:
        native().watch(None)
