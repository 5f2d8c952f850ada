"""Wrong values for the fields of a damaged checkpoint."""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch

from forgather.ml.checkpoint.errors import CheckpointLoadError

WRONG: dict[str, Any] = {
    "text": "text",
    "parent": "../../x",
    "negative": -1,
    "huge": 2**70,
    "none": None,
    "list": [],
    "dict": {},
    "tensor": torch.zeros(2, 3),
    "true": True,
    "fraction": 0.5,
    "function": print,
    "object": object(),
}

COUNT: frozenset[str] = frozenset()
INTEGER = frozenset({"negative"})
NUMBER = frozenset({"negative", "fraction"})
AMOUNT = frozenset({"huge", "fraction"})
FLAG = frozenset({"true"})


def with_none(accepted: Iterable[str]) -> frozenset[str]:
    return frozenset({*accepted, "none"})


def replaced(state: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return the state with another value at a dotted path."""
    changed = copy.deepcopy(dict(state))
    *outer, last = path.split(".")
    place: Any = changed
    for key in outer:
        place = place[int(key)] if isinstance(place, list) else place[key]
    place[int(last) if isinstance(place, list) else last] = value
    return changed


def assert_refuses(component: Any, state: Mapping[str, Any], root: str, accepted: Mapping[str, Iterable[str]]) -> None:
    """Assert that each wrong value at each path raises an error with its name and changes nothing, unless accepted."""
    before = repr(component.state_dict())
    for path, fine in accepted.items():
        for name, value in WRONG.items():
            hostile = replaced(state, path, value)
            if name in fine:
                component.check_state_dict(hostile)
                continue
            for refuse in (component.check_state_dict, component.load_state_dict):
                assert_refused(refuse, hostile, f"{root}.{path}", name)
            assert repr(component.state_dict()) == before, (path, name)


def assert_refused(refuse: Callable[[Any], Any], state: Any, key: str, name: str = "") -> None:
    try:
        refuse(state)
    except CheckpointLoadError as error:
        assert str(error).startswith(key), (key, name, str(error))
        assert "Choose another checkpoint" in str(error) or "skip_checkpoint_components" in str(error)
    else:
        pytest.fail(f"{name} is taken for {key}")
