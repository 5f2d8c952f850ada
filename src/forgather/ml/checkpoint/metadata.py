"""Checkpoint metadata (`checkpoint_metadata.json`): list of best checkpoints and state of callbacks.

Stored as JSON and checked against a schema on reading, so that a damaged file raises before any callback is changed.
`CheckpointManager` writes and restores it; rotation updates the list of best checkpoints.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from forgather.ml.checkpoint.encoding import strict_json
from forgather.ml.checkpoint.encoding.codec import decode_state, encode_state
from forgather.ml.checkpoint.errors import CheckpointCorruptError, CheckpointSaveError
from forgather.ml.checkpoint.files.eval_metrics import EVAL_METRICS_NAME, metrics_bytes
from forgather.ml.checkpoint.files.regular_files import read_small_file
from forgather.ml.checkpoint.retention import BestCheckpoints
from forgather.ml.checkpoint.state.state_schema import (
    Schema,
    Violation,
    anything,
    checked,
    list_like,
    list_of,
    mapping_of,
    number,
    optional,
    plain,
    relative_name,
    require_mapping,
    text,
    that,
)

METADATA_NAME = "checkpoint_metadata.json"
METADATA_COMPONENT = "metadata"
"""Manifest key of files that belong to no component: metrics, state of callbacks."""

_rank = that("a rank as decimal text", lambda value: type(value) is str and value.isascii() and value.isdecimal())
_FIELDS = {
    "best_checkpoints": list_of(list_like([relative_name, number])),
    "best_metric_key": optional(text),
    "callbacks": mapping_of(text, mapping_of(_rank, anything)),
    "weight_decay_groups": that("'all' or 'auto'", lambda value: value in ("all", "auto")),
}
_METADATA = Schema(_FIELDS, may_lack=["weight_decay_groups"])


@dataclass(frozen=True)
class CheckpointMetadata:
    """Contents of the metadata file of one checkpoint."""

    best_checkpoints: list[tuple[str, float]] = field(default_factory=list)
    """Directory names, not paths, because an output directory may be moved."""
    best_metric_key: str | None = None
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Callback name -> rank (as text) -> state, for the ranks that have state."""
    weight_decay_groups: str = "all"
    """Parameter grouping of the optimizer. Older files lack the field: they had one group with all parameters."""

    @classmethod
    def of(
        cls, best: BestCheckpoints, states_by_rank: Sequence[Mapping[str, Any]], weight_decay_groups: str = "all"
    ) -> "CheckpointMetadata":
        callbacks: dict[str, dict[str, Any]] = {}
        for rank, states in enumerate(states_by_rank):
            for name, state in states.items():
                callbacks.setdefault(name, {})[str(rank)] = state
        return cls(callbacks=callbacks, weight_decay_groups=weight_decay_groups).with_best(best)

    @classmethod
    def states_of(cls, callbacks: Iterable[Any]) -> dict[str, Any]:
        """Return the states of all callbacks that have state, encoded as JSON values."""
        return {name: _storable(name, _state_of(callback)) for name, callback in _stateful(callbacks)}

    @classmethod
    def read(cls, checkpoint_path: str) -> "CheckpointMetadata":
        """Read the metadata of a checkpoint; empty without the file. Raise `CheckpointCorruptError` if invalid."""
        path = os.path.join(checkpoint_path, METADATA_NAME)
        try:
            data = strict_json.loads(read_small_file(path), path)
        except FileNotFoundError:
            return cls()
        try:
            _METADATA(data)
        except Violation as violation:
            raise CheckpointCorruptError(f"{path} is damaged: {violation.message('metadata')}") from None
        best = [(name, value) for name, value in data["best_checkpoints"]]
        return cls(best, data["best_metric_key"], data["callbacks"], data.get("weight_decay_groups", "all"))

    def with_best(self, best: BestCheckpoints) -> "CheckpointMetadata":
        entries = [(os.path.basename(os.path.normpath(path)), value) for path, value in best.entries]
        return replace(self, best_checkpoints=entries, best_metric_key=best.metric_key)

    def best_below(self, root: str) -> BestCheckpoints:
        """Return the best checkpoints that still exist in the directory `root`."""
        best = BestCheckpoints(
            [(os.path.join(root, name), value) for name, value in self.best_checkpoints], self.best_metric_key
        )
        best.drop_missing()
        return best

    def check_callbacks(self, callbacks: Iterable[Any], rank: int) -> None:
        """Raise `CheckpointLoadError` if a callback cannot use its state. No callback is changed."""
        self._states_for(callbacks, rank)

    def restore_callbacks(self, callbacks: Iterable[Any], rank: int) -> None:
        """Load the state of every callback. If one state does not fit, raise before any callback is changed."""
        for callback, state in self._states_for(callbacks, rank):
            _give_back(callback, state)

    def _states_for(self, callbacks: Iterable[Any], rank: int) -> list[tuple[Any, Any]]:
        # A list instead of a generator: all states are checked before the first one is applied.
        found = []
        for name, callback in _stateful(callbacks):
            by_rank = self.callbacks.get(name, {})
            if str(rank) not in by_rank:
                # The callback is new, or the rank did not exist in the saving job.
                continue
            state = decode_state(by_rank[str(rank)])
            # The `state_dict()` of a user's callback may return None for no state.
            if state is not None or _checks_what_it_loads(callback):
                _check_state(name, callback, state)
                found.append((callback, state))
        return found

    def to_bytes(self) -> bytes:
        data = {
            "best_checkpoints": self.best_checkpoints,
            "best_metric_key": self.best_metric_key,
            "callbacks": self.callbacks,
            "weight_decay_groups": self.weight_decay_groups,
        }
        return strict_json.dumps(data, METADATA_NAME)


def _stateful(callbacks: Iterable[Any]) -> list[tuple[str, Any]]:
    """Return the callbacks with state and their names. Further callbacks of the same name get a suffix such as "#2"."""
    named: dict[str, Any] = {}
    for callback in callbacks:
        if _has_own_state(callback) or _is_exportable(callback):
            base = str(getattr(callback, "name", type(callback).__name__))
            name, number = base, 1
            while name in named:
                number += 1
                name = f"{base}#{number}"
            named[name] = callback
    return list(named.items())


def _has_own_state(callback: object) -> bool:
    return hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict")


def _is_exportable(callback: object) -> bool:
    """Return whether a callback has the state interface of transformers (`ExportableState`)."""
    return callable(getattr(callback, "state", None)) and hasattr(callback, "from_state")


def _state_of(callback: Any) -> object:
    # An exportable state has "args" and "attributes". The args are settings, and the user's current settings apply.
    return callback.state_dict() if _has_own_state(callback) else callback.state()["attributes"]


def _check_state(name: str, callback: Any, state: object) -> None:
    if _checks_what_it_loads(callback):
        callback.check_state_dict(state)
    elif not _has_own_state(callback):
        known = callback.state()["attributes"]
        remedy = f"or train without the callback {name}"
        checked(lambda value: _check_attributes(value, known), state, f"callbacks.{name}", remedy)


def _checks_what_it_loads(callback: object) -> bool:
    """Return whether the class that defines `load_state_dict` also defines `check_state_dict`.

    A subclass that overrides only `load_state_dict` has another state format, which an inherited check would reject.
    """
    owner = next((cls for cls in type(callback).__mro__ if "load_state_dict" in vars(cls)), None)
    return owner is not None and "check_state_dict" in vars(owner)


def _check_attributes(state: Any, known: Mapping[str, Any]) -> None:
    """Raise `Violation` for keys that the callback does not export: each key is passed to `setattr`."""
    require_mapping(state)
    for key in state:
        if key not in known:
            # Otherwise a damaged or crafted file could overwrite any method of the callback.
            raise Violation(f"left out, since the callback exports only {sorted(known)}", state[key], [key])
    plain(state)


def _give_back(callback: Any, state: Any) -> None:
    # `from_state` of transformers would construct a new callback; here the existing one takes the attributes.
    if _has_own_state(callback):
        callback.load_state_dict(state)
        return
    for name, value in state.items():
        setattr(callback, name, value)


def _storable(name: str, state: object) -> object:
    # JSON has no NaN and no infinity, so these floats are tagged.
    encoded = strict_json.with_tagged_floats(encode_state(state, name))
    try:
        stored = json.loads(json.dumps(encoded))
    except TypeError as error:
        raise CheckpointSaveError(
            f"The state of callback {name!r} cannot be written as JSON: {_first_misfit(encoded, name)} ({error}). Use "
            "only numbers, text, lists and dicts. Put large or binary state into a separate component."
        ) from error
    # JSON turns keys such as 1 and True into text without an error.
    if stored != encoded:
        raise CheckpointSaveError(
            f"The state of callback {name!r} would change when written as JSON: {_first_misfit(encoded, name)}. Use "
            "only text for dict keys."
        )
    return stored


def _first_misfit(value: object, path: str) -> str | None:
    """Return the first value or key that JSON cannot hold, with its path; None if there is no such value."""
    if isinstance(value, dict):
        for key in value:
            if type(key) is not str:
                return f"{path} has the key {key!r} of type {type(key).__name__}"
        return next(filter(None, (_first_misfit(inner, f"{path}.{key}") for key, inner in value.items())), None)
    if isinstance(value, list):
        return next(filter(None, (_first_misfit(inner, f"{path}[{i}]") for i, inner in enumerate(value))), None)
    return (
        None if value is None or type(value) in (bool, int, float, str) else f"{path} is of type {type(value).__name__}"
    )


def extra_files_of(callbacks: Iterable[object], metrics: Mapping[str, object] | None) -> dict[str, bytes]:
    """Return the small files of a checkpoint beside its state: evaluation metrics, and files of callbacks."""
    files = {} if metrics is None else {EVAL_METRICS_NAME: metrics_bytes(metrics)}
    for callback in callbacks:
        if hasattr(callback, "checkpoint_files"):
            files.update(callback.checkpoint_files())
    return files
