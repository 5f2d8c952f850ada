"""Target of a mutation: one file in a private copy of a checkpoint, and its surroundings."""

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

MANIFEST = "checkpoint_manifest.json"
METADATA = "checkpoint_metadata.json"
REMOVED = object()
"""Returned by an edit to remove the node."""


@dataclass(frozen=True)
class Place:
    """File of a checkpoint that may be changed freely."""

    checkpoint: Path
    name: str
    marker: Path
    """File that exists only if code from a checkpoint ran."""
    outside: Path
    """Directory outside of all checkpoints; its `sentinel.pt` is a valid state file."""

    @property
    def path(self) -> Path:
        return self.checkpoint / self.name

    @property
    def older(self) -> Path:
        return self.checkpoint.parent / "checkpoint-1"

    def read(self) -> bytes:
        return self.path.read_bytes()

    def write(self, content: bytes) -> None:
        self.path.write_bytes(content)

    def way_out(self) -> str:
        """Return a relative path out of the checkpoint to the sentinel."""
        return os.path.relpath(self.outside / "sentinel.pt", self.checkpoint)


def edited(node: Any, route: Sequence[int], edit: Callable[[Any], Any]) -> Any:
    """Return a copy of nested containers with one node edited; each number of the route selects a child."""
    if not route or not isinstance(node, (dict, list, tuple)) or not node:
        return edit(node)
    keys = list(node) if isinstance(node, dict) else range(len(node))
    key = keys[route[0] % len(keys)]
    child = edited(node[key], route[1:], edit)
    changed = list(node) if isinstance(node, tuple) else copy.copy(node)
    if child is REMOVED:
        del changed[key]
    else:
        changed[key] = child
    return tuple(changed) if isinstance(node, tuple) else changed


def keys_on(node: Any, route: Sequence[int]) -> list[Any]:
    """Return the keys along a route."""
    passed = []
    for number in route:
        if not isinstance(node, (dict, list, tuple)) or not node:
            break
        keys = list(node) if isinstance(node, dict) else range(len(node))
        passed.append(keys[number % len(keys)])
        node = node[passed[-1]]
    return passed


def is_only_other_data(old: Any, new: Any) -> bool:
    """Return whether `new` could have been saved instead of `old`: same type, an int for a float, or None."""
    if old is None or new is None:
        return not isinstance(new if old is None else old, (dict, list, tuple))
    if type(old) is float and type(new) is int:
        return True
    if isinstance(old, Tensor) and old.ndim == 0 and type(new) in (int, float):
        # Older versions of torch kept the step count of an optimizer as a plain number.
        return True
    if type(old) is not type(new) or isinstance(old, (dict, list, tuple)):
        return False
    return not hasattr(old, "layout") or _has_same_form(old, new)


def _has_same_form(old: Any, new: Any) -> bool:
    """Return whether two tensors are interchangeable; other floating dtypes are converted at load."""
    if new.is_nested or any(getattr(old, name) != getattr(new, name) for name in ("shape", "layout", "device")):
        return False
    return old.dtype == new.dtype or (old.is_floating_point() and new.is_floating_point())
