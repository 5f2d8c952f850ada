"""Comparison of two checkpoints by name: weights, optimizer state and scalars, of any trainer and number of ranks.

Tensors with equal checksums in both manifests are not read. The others are read one by one. State files are read as
data by the restricted reader, and no code of a checkpoint runs.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.components import MODEL_KEY
from forgather.ml.checkpoint.encoding.digest import combine_digests, iter_leaves, state_digests, tensor_digest
from forgather.ml.checkpoint.files.state_files import read_state
from forgather.ml.checkpoint.manifest import CheckpointManifest, FileRecord
from forgather.ml.checkpoint.reader import RNG_KEY
from forgather.ml.checkpoint.replicas import largest_difference
from forgather.ml.checkpoint.weights.location import WeightLocation, locate_weights, read_tensors
from forgather.ml.checkpoint.weights.safetensors_io import read_header

MOST_SHOWN = 10
_OF_RANKS = (RNG_KEY, "dataset")
"""Components with files by rank: compared only between runs with the same files."""
_NOT_COMPARED = ("state.log_history", "best_model_checkpoint", "eval_metrics")
"""Parts of component "trainer" with times and paths, which differ between any two runs. Logs have the losses."""


@dataclass(frozen=True)
class TensorDifference:
    """Tensor or other value that differs between two checkpoints."""

    component: str
    name: str
    what: str
    """Description, such as "largest difference 0.01" or "float32 [2, 3] and bfloat16 [2, 3]"."""
    largest: float | None = None
    """Largest absolute difference of two tensors of the same dtype and shape, if it was measured."""


@dataclass(frozen=True)
class CheckpointDifference:
    """Differences between two checkpoints: the first in model order, and their number."""

    step: int | None
    paths: tuple[str, str]
    shown: tuple[TensorDifference, ...]
    num_different: int


def first_difference(path_a: str, path_b: str) -> CheckpointDifference | None:
    """Return the first differences between two complete checkpoints, or None if all that both have is equal.

    Weights come first, in the order of the model, then the states of optimizer, schedule and other components. Raises
    `CheckpointError` for a damaged checkpoint.
    """
    first, second = store.open_checkpoint(path_a), store.open_checkpoint(path_b)
    shown: list[TensorDifference] = []
    number = 0
    for difference in _differences((path_a, first.manifest), (path_b, second.manifest)):
        number += 1
        if len(shown) < MOST_SHOWN:
            shown.append(difference())
    return CheckpointDifference(first.manifest.step, (path_a, path_b), tuple(shown), number) if number else None


_Side = tuple[str, CheckpointManifest]


class _Found:
    """Difference that is measured only when it is shown."""

    def __init__(self, component: str, name: str, first: Any, second: Any) -> None:
        self._component, self._name = component, name
        self._values = first, second

    def __call__(self) -> TensorDifference:
        first, second = (value() if callable(value) else value for value in self._values)
        what, largest = _described(first, second)
        return TensorDifference(self._component, self._name, what, largest)


def _differences(first: _Side, second: _Side) -> Iterator[_Found]:
    keys = [key for key in first[1].components if key in second[1].components and key != MODEL_KEY]
    states = {key: _state_pair(key, first, second) for key in keys if key == "optimizer"}
    order = list((states["optimizer"] or ({}, {}))[0].get("state", {})) if "optimizer" in states else []
    if all(MODEL_KEY in side[1].components and side[1].weights == "included" for side in (first, second)):
        yield from _weight_differences(_weights(first), _weights(second), order)
    for key in keys:
        pair = states.get(key) or _state_pair(key, first, second)
        if pair is not None:
            yield from _state_differences(key, *pair)


# --- weights


def _weights(side: _Side) -> WeightLocation:
    path, manifest = side
    return locate_weights(path, manifest.components[MODEL_KEY].metadata.get("param_sharing"))


def _weight_differences(first: WeightLocation, second: WeightLocation, order: list[str]) -> Iterator[_Found]:
    names = dict.fromkeys([*(name for name in order if name in first.weight_map), *sorted(first.weight_map)])
    for name in names:
        if second.stored_name(name) is None:
            yield _Found(MODEL_KEY, name, "present", "missing")
        elif _may_differ(first, second, name):
            yield _Found(MODEL_KEY, name, _reader(first, name), _reader(second, name))
    for name in second.weight_map:
        if first.stored_name(name) is None:
            yield _Found(MODEL_KEY, name, "missing", "present")


def _may_differ(first: WeightLocation, second: WeightLocation, name: str) -> bool:
    checksums = [_checksum(one, name) for one in (first, second)]
    if None not in checksums:
        return checksums[0] != checksums[1]
    return _text(_reader(first, name)()) != _text(_reader(second, name)())


def _checksum(location: WeightLocation, name: str) -> str | None:
    """Return dtype, shape and recorded checksum of a tensor; None if the manifest has no checksum of it."""
    stored = location.stored_name(name) or name
    file = location.weight_map[stored]
    path, record = location.path_and_record(file)
    if record is None or not file.endswith(".safetensors") or stored not in record.tensors:
        return None
    entry = read_header(path, record).tensors[stored]
    return f"{entry.dtype} {entry.shape} {record.tensors[stored]}"


def _reader(location: WeightLocation, name: str) -> Any:
    return lambda: read_tensors(location, [name], "cpu")[name]


# --- other components


def _state_pair(key: str, first: _Side, second: _Side) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return the states of a component, joined over its files; None if they cannot be compared."""
    records = [side[1].component_files(key) for side in (first, second)]
    if key in _OF_RANKS and {one.path for one in records[0]} != {one.path for one in records[1]}:
        return None
    if key in _OF_RANKS and _are_equal(*records):
        return None
    return _joined(first[0], records[0], key), _joined(second[0], records[1], key)


def _are_equal(first: list[FileRecord], second: list[FileRecord]) -> bool:
    return {one.path: one.checksum for one in first} == {one.path: one.checksum for one in second}


def _joined(path: str, records: list[FileRecord], key: str) -> dict[str, Any]:
    """Return the content of all files of a component: state by FQN, so that ranks and stages do not matter."""
    joined: dict[str, Any] = {}
    for record in records:
        state_path = os.path.join(path, record.path)
        # An optional file may be missing.
        if not os.path.lexists(state_path):
            continue
        state = read_state(state_path, record, mapped=True)
        if key in _OF_RANKS:
            joined[record.path] = state
        elif isinstance(state, dict):
            _merge(joined, _by_name(state))
    return joined


def _by_name(state: dict[str, Any]) -> dict[str, Any]:
    """Return optimizer state with the options of groups by parameter, instead of by the number of the group."""
    groups = state.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(one, dict) and "params" in one for one in groups):
        return state
    options = {
        name: {key: value for key, value in group.items() if key != "params"}
        for group in groups
        for name in group["params"]
    }
    return {**{key: value for key, value in state.items() if key != "param_groups"}, "options": options}


def _merge(joined: dict[str, Any], state: Mapping[str, Any]) -> None:
    for name, value in state.items():
        if isinstance(value, dict) and isinstance(joined.get(name), dict):
            _merge(joined[name], value)
        else:
            joined.setdefault(name, value)


def _state_differences(key: str, first: dict[str, Any], second: dict[str, Any]) -> Iterator[_Found]:
    if key == RNG_KEY:
        # Thousands of integers per rank: one line for each rank is enough.
        yield from (
            _Found(key, path, "a random state", "another")
            for path in first
            if _text(first[path]) != _text(second[path])
        )
        return
    leaves, others = dict(iter_leaves(first)), dict(iter_leaves(second))
    for name in dict.fromkeys([*leaves, *others]):
        if key == "trainer" and name.startswith(_NOT_COMPARED):
            continue
        values = leaves.get(name, "missing"), others.get(name, "missing")
        if _text(values[0]) != _text(values[1]):
            yield _Found(key, name, *values)


# --- values


def _text(value: Any) -> str:
    """Return text that is equal for values of equal bits."""
    if isinstance(value, Tensor):
        return f"{_kind(value)} {tensor_digest(value)}"
    return combine_digests(state_digests({"": value}))


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _described(first: Any, second: Any) -> tuple[str, float | None]:
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        return f"{_short(first)} and {_short(second)}", None
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return f"{_kind(first)} and {_kind(second)}", None
    largest = largest_difference(torch.clone(first), second)
    return ("values differ" if largest is None else f"largest difference {largest:.3g}"), largest


def _short(value: Any) -> str:
    text = _kind(value) if isinstance(value, Tensor) else str(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
