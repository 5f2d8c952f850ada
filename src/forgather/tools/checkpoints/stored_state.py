"""State of a checkpoint by name, as in the full model on one device: tensors one at a time, and plain values.

Weights, optimizer state and EMA weights have FQNs, whatever trainer and topology wrote them: the files of all ranks are
merged. Other state with one file per rank keeps the rank in its names. Tensors are read on demand, from mapped files.
"""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forgather.ml.checkpoint.components import MODEL_KEY
from forgather.ml.checkpoint.errors import StateDecodingError
from forgather.ml.checkpoint.files.regular_files import path_inside
from forgather.ml.checkpoint.files.state_files import checked_weights, read_state, read_state_outline
from forgather.ml.checkpoint.manifest import CheckpointManifest, FileRecord
from forgather.ml.checkpoint.state.optimizer_options import MACHINE_OPTIONS
from forgather.ml.checkpoint.state.optimizer_state import OptimizerState
from forgather.ml.checkpoint.store import FoundCheckpoint
from forgather.ml.checkpoint.weights.index import stored_names
from forgather.ml.checkpoint.weights.location import WeightLocation, locate_weights, read_tensors
from forgather.ml.checkpoint.weights.safetensors_io import read_header

_OPTIMIZER_KEYS = frozenset({"state", "param_groups"})
_AVERAGES = "averages"
_CONTAINERS = (Mapping, list, tuple, Tensor, np.ndarray)


@dataclass(frozen=True)
class StoredTensor:
    """Tensor of a checkpoint: its description, and the function that reads it."""

    component: str
    name: str
    """FQN of a weight; `<FQN>.<key>` for optimizer state; a path of keys for other state."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: str
    read: Callable[[], Tensor] = field(repr=False, compare=False)

    @property
    def num_bytes(self) -> int:
        count = self.dtype.itemsize
        for length in self.shape:
            count *= length
        return count


@dataclass
class StoredState:
    """Tensors and plain values of a checkpoint, both by component and name."""

    tensors: dict[tuple[str, str], StoredTensor] = field(default_factory=dict)
    values: dict[tuple[str, str], object] = field(default_factory=dict)


def read_stored_state(
    found: FoundCheckpoint, components: Collection[str] | None = None, with_data: bool = True
) -> StoredState:
    """Return the state of a complete checkpoint, of all components or of some.

    With `with_data`, checksums of state files are verified now, and of weights when they are read. Without it only
    headers are read, and `StoredTensor.read` must not be called.
    """
    state = StoredState()
    for key in found.manifest.components:
        if components is None or key in components:
            _Component(found, key, with_data, state).add()
    return state


class _Component:
    """One component of a checkpoint, whose state is added to a `StoredState`."""

    def __init__(self, found: FoundCheckpoint, key: str, with_data: bool, state: StoredState) -> None:
        self._path, self._manifest, self._key = found.path, found.manifest, key
        self._with_data = with_data
        self._state = state
        self._records = [
            record for record in found.manifest.component_files(key) if record.path not in found.missing_optional
        ]

    def add(self) -> None:
        if self._key == MODEL_KEY and any(record.tensors for record in self._records):
            self._add_weights()
            return
        files = [record for record in self._records if record.path.endswith(".pt")]
        states = [self._read(record) for record in files]
        if states and all(map(is_optimizer_state, states)):
            self._add_optimizer(states, files)
        elif states and all(isinstance(one, Mapping) and isinstance(one.get(_AVERAGES), Mapping) for one in states):
            self._add_averages(states, files)
        else:
            for record, state in zip(files, states, strict=True):
                self._add_all(state, _prefix_of(record), record.path)

    def _read(self, record: FileRecord) -> Any:
        path = path_inside(self._path, record.path)
        if self._with_data:
            return read_state(path, record, mapped=True)
        try:
            return read_state_outline(path, record)
        except StateDecodingError:
            # NumPy arrays, as in random state, are decoded from their bytes. Such files are small.
            return read_state(path, mapped=True)

    def _add_weights(self) -> None:
        location = locate_weights(self._path, _sharing_of(self._manifest))
        for file in dict.fromkeys(location.weight_map.values()):
            names = [name for name, place in location.weight_map.items() if place == file]
            for tensor in self._weights_in(location, file, names):
                self._state.tensors[self._key, tensor.name] = tensor

    def _weights_in(self, location: WeightLocation, file: str, names: Sequence[str]) -> Iterator[StoredTensor]:
        path, record = location.path_and_record(file)
        if file.endswith(".safetensors"):
            entries = read_header(path, record).tensors
            for name in names:
                entry = entries[name]
                yield StoredTensor(
                    self._key, name, entry.shape, entry.dtype, file, functools.partial(_weight, location, name)
                )
            return
        # A .bin file cannot be read in parts, so it is mapped once.
        assert record is not None
        for name, tensor in checked_weights(path, self._read(record)).items():
            yield self._tensor(name, tensor, file)

    def _add_optimizer(self, states: Sequence[Any], files: Sequence[FileRecord]) -> None:
        places = {name: record.path for state, record in zip(states, files, strict=True) for name in state["state"]}
        merged = OptimizerState.merge_state_dicts(states)
        # A stage may have a tied parameter under another name of its group, with a copy of the same state.
        stored = stored_names(list(merged["state"]), _sharing_of(self._manifest))
        for name, state in merged["state"].items():
            if stored[name] == name:
                self._add_all(state, name, places[name])
        for entry in ("param_groups", "initial_options"):
            for number, group in enumerate(merged[entry]):
                self._add_all(_plain_options(group), f"{entry}[{number}]", files[0].path)
                if group is not None and "params" in group:
                    self._state.values[self._key, f"{entry}[{number}].params"] = sorted(group["params"])

    def _add_averages(self, states: Sequence[Any], files: Sequence[FileRecord]) -> None:
        # Replicas of a pipeline stage hold the same averages, so the first file wins.
        for state, record in reversed(list(zip(states, files, strict=True))):
            rest = {key: value for key, value in state.items() if key != _AVERAGES}
            self._add_all(state[_AVERAGES], "", record.path)
            self._add_all(rest, "", record.path)

    def _add_all(self, state: object, prefix: str, file: str) -> None:
        for name, leaf in leaves_of(state, prefix):
            if isinstance(leaf, Tensor):
                self._state.tensors[self._key, name] = self._tensor(name, leaf, file)
            else:
                self._state.values[self._key, name] = leaf

    def _tensor(self, name: str, tensor: Tensor, file: str) -> StoredTensor:
        return StoredTensor(self._key, name, tuple(tensor.shape), tensor.dtype, file, lambda: tensor)


def is_optimizer_state(state: object) -> bool:
    """Return whether a state has the format of `OptimizerState`."""
    return isinstance(state, Mapping) and set(state) >= _OPTIMIZER_KEYS


def _weight(location: WeightLocation, name: str) -> Tensor:
    return read_tensors(location, [name], "cpu")[name]


def _sharing_of(manifest: CheckpointManifest) -> list[list[str]]:
    model = manifest.components.get(MODEL_KEY)
    sharing: list[list[str]] = [] if model is None else model.metadata.get("param_sharing", [])
    return sharing


def _plain_options(group: Mapping[str, Any] | None) -> object:
    # The machine chooses these options, and a resume does not restore them.
    left_out = {"params", *MACHINE_OPTIONS}
    return {} if group is None else {name: value for name, value in group.items() if name not in left_out}


def _prefix_of(record: FileRecord) -> str:
    """Return the ranks that own a file, for state that differs between ranks; "" for state of all ranks."""
    if record.owner is None:
        return ""
    ranks = record.owner_ranks
    return f"[rank {ranks[0]}]" if len(ranks) == 1 else f"[ranks {', '.join(map(str, ranks))}]"


def leaves_of(state: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield tensors and plain values with their path of keys; a list of numbers or text is one value."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from leaves_of(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(state, (list, tuple)) and any(isinstance(one, _CONTAINERS) for one in state):
        for number, value in enumerate(state):
            yield from leaves_of(value, f"{prefix}[{number}]")
    elif isinstance(state, np.ndarray) and state.dtype.kind in "biufc":
        yield prefix, torch.as_tensor(state)
    else:
        yield prefix, list(state) if isinstance(state, tuple) else state
