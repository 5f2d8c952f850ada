"""State mutations: changed content of state files, written by `torch.save` like a regular save."""

import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.guarantees.hostile_checkpoints.fuzz.place import REMOVED, Place, edited, is_only_other_data, keys_on
from tests.guarantees.hostile_checkpoints.fuzz.state_values import VALUES, Old

# Log records hold any values that callbacks put there.
_FREE_FORM = frozenset({"log_history"})
ODD_KEYS: tuple[Any, ...] = ("", "a", "__forgather__", "state", "step", 0, -1, 10**30, None, 2.5, (1, 2), True)


def replace_node(place: Place, route: list[int], value: str) -> bool:
    """Replace a value."""
    state = read_state(place)
    tensors = list(iter_tensors(state))
    seen: list[bool] = []

    def replace(node: Any) -> Any:
        new = VALUES[value](Old(node, tensors, str(place.marker)))
        seen.append(is_only_other_data(node, new))
        return new

    place.write(saved(edited(state, route, replace)))
    return seen[0] or _is_free(state, route)


def remove_node(place: Place, route: list[int]) -> bool:
    """Remove a key or an item."""
    state = read_state(place)
    place.write(saved(edited(state, route or [0], lambda _: REMOVED)))
    return _is_free(state, route)


def add_node(place: Place, route: list[int], key: int, value: str) -> bool:
    """Add a key or an item to a container; other values stay unchanged."""
    state = read_state(place)

    def add(node: Any) -> Any:
        new = VALUES[value](Old(None, list(iter_tensors(state)), str(place.marker)))
        if isinstance(node, dict):
            return {**node, ODD_KEYS[key % len(ODD_KEYS)]: new}
        return type(node)([*node, new]) if type(node) in (list, tuple) else node

    place.write(saved(edited(state, route, add)))
    return _is_free(state, route)


def rename_key(place: Place, route: list[int], key: int) -> bool:
    """Rename a key of a dict."""
    state = read_state(place)

    def rename(node: Any) -> Any:
        if not isinstance(node, dict) or not node:
            return node
        names = list(node)
        names[key % len(names)] = ODD_KEYS[key % len(ODD_KEYS)]
        return dict(zip(names, node.values(), strict=True))

    place.write(saved(edited(state, route, rename)))
    return _is_free(state, route)


def swap_nodes(place: Place, route: list[int], other: list[int]) -> bool:
    """Swap two values."""
    state = read_state(place)
    found: list[Any] = []

    def note(node: Any) -> Any:
        found.append(node)
        return node

    edited(state, route, note)
    edited(state, other, note)
    if isinstance(found[0], (dict, list, tuple)) or isinstance(found[1], (dict, list, tuple)):
        # One container may contain the other. A full swap would create a cycle.
        place.write(saved(edited(state, route, lambda _: found[1])))
        return False
    place.write(saved(edited(edited(state, route, lambda _: found[1]), other, lambda _: found[0])))
    return is_only_other_data(*found) and is_only_other_data(found[1], found[0])


def read_state(place: Place) -> Any:
    return torch.load(place.path, weights_only=True)


def saved(state: Any) -> bytes:
    """Return the bytes that `torch.save` writes, with cloned tensors if it rejects the state."""
    buffer = io.BytesIO()
    try:
        torch.save(state, buffer)
    except (RuntimeError, RecursionError, pickle.PicklingError, NotImplementedError):
        buffer = io.BytesIO()
        torch.save(_cloned(state), buffer)
    return buffer.getvalue()


def _cloned(node: Any) -> Any:
    """Clone the tensors, because one storage cannot be written with two dtypes."""
    if isinstance(node, Tensor) and node.layout is torch.strided and not node.is_meta and node.numel() < 10**6:
        return node.detach().clone()
    if type(node) is dict:
        return {key: _cloned(inner) for key, inner in node.items()}
    return type(node)(map(_cloned, node)) if type(node) in (list, tuple) and len(node) < 100 else node


def iter_tensors(node: Any) -> Iterator[Tensor]:
    if isinstance(node, Tensor):
        yield node
    elif isinstance(node, (dict, list, tuple)):
        for inner in node.values() if isinstance(node, dict) else node:
            yield from iter_tensors(inner)


def _is_free(state: Any, route: list[int]) -> bool:
    return not _FREE_FORM.isdisjoint(key for key in keys_on(state, route) if isinstance(key, str))


# --- weights in the same format


def change_weights(place: Place, name: int, way: str) -> bool:
    """Change one tensor of a `.bin` file."""
    state = dict(read_state(place))
    key = sorted(state)[name % len(state)]
    changed = WEIGHTS[way](state, key, str(place.marker))
    place.write(saved(changed))
    return isinstance(changed, dict) and key in changed and _fits(state[key], changed[key])


def _fits(old: Tensor, new: Any) -> bool:
    """Return whether a tensor fits; other real dtypes are converted at load."""
    if type(new) not in (Tensor, torch.nn.Parameter) or new.layout is not torch.strided or new.is_meta:
        return False
    return new is not old and new.shape == old.shape and not new.is_complex()


def _with(value: str) -> Callable[[dict[str, Any], str, str], Any]:
    return lambda state, key, marker: {
        **state,
        key: VALUES[value](Old(state[key], list(iter_tensors(state)), marker)),
    }


def _without(state: dict[str, Any], key: str, marker: str) -> Any:
    return {name: tensor for name, tensor in state.items() if name != key}


WEIGHTS: dict[str, Callable[[dict[str, Any], str, str], Any]] = {
    **{value: _with(value) for value in VALUES},
    "missing": _without,
    "extra": lambda state, key, marker: {**state, "extra.weight": torch.ones(3)},
    "extra number": lambda state, key, marker: {**state, "extra": 1},
    "extra key": lambda state, key, marker: {**state, 7: torch.ones(3)},
    "list": lambda state, key, marker: list(state.items()),
    "nothing": lambda state, key, marker: None,
    "tensor": lambda state, key, marker: state[key],
    "nested": lambda state, key, marker: {"state_dict": state},
}
