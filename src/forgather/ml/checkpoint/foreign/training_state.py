"""Training state of a foreign checkpoint: reads the files of optimizer, schedule and step as plain data.

A missing, unsafe or unusable file does not fail the import. It becomes a `LeftOut` with the reason and the path.
`importing` calls `read_training_state` on every rank.
"""

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from forgather.ml.checkpoint.encoding import strict_json
from forgather.ml.checkpoint.errors import CheckpointError, CheckpointLoadError
from forgather.ml.checkpoint.files.regular_files import read_small_file
from forgather.ml.checkpoint.files.state_files import read_state
from forgather.ml.checkpoint.foreign.ownership import Owner
from forgather.ml.checkpoint.foreign.report import LeftOut
from forgather.ml.checkpoint.manifest import MANIFEST_NAME

T = TypeVar("T")

# Up to here a float holds every integer exactly. A larger step or epoch is damage.
_LARGEST_STEP = 2**53
_STEP_IN_NAME = re.compile(r"checkpoint-([0-9]{1,15})$")
_STATE_FILE = re.compile(r"([A-Za-z0-9][\w.-]*?)_state(_(rank|node)_\d+|_group_[\w.-]+_\d+)?\.pt$")


@dataclass(frozen=True)
class Progress:
    """Training progress; the epoch is None if the directory does not record it."""

    global_step: int
    epoch: float | None


@dataclass(frozen=True)
class ForeignState:
    """Content of a directory besides weights, in the form that the other program wrote."""

    optimizer: Any | LeftOut
    scheduler: Any | LeftOut
    progress: Progress | LeftOut
    others: dict[str, str] = field(default_factory=dict)
    """Further state that is never imported -> reason."""
    is_per_rank: bool = False
    """Whether the optimizer's indices count only the parameters of this rank."""


def read_training_state(path: str, owner: Owner, rank: int, world_size: int) -> ForeignState:
    """Return the state that can be imported; a missing or unsafe state file does not raise."""
    if owner is Owner.TRANSFORMERS:
        return _of_transformers(path)
    if owner is Owner.UNVERSIONED:
        return _of_unversioned(path, rank, world_size)
    reason = LeftOut(f"only weights are imported from {owner.value}")
    return ForeignState(reason, reason, reason)


def attempt(read: Callable[[], T]) -> T | LeftOut:
    """Return the result of `read`, or a `LeftOut` with the reason if it fails."""
    try:
        return read()
    except FileNotFoundError as error:
        return LeftOut(f"{error.filename} is missing")
    except CheckpointError as error:
        return LeftOut(str(error))


# --- transformers.Trainer


def _of_transformers(path: str) -> ForeignState:
    state = attempt(lambda: _json_object(os.path.join(path, "trainer_state.json")))
    progress = state if isinstance(state, LeftOut) else attempt(lambda: _progress(state, path))
    others = {} if isinstance(state, LeftOut) else _other_entries(state)
    names = sorted(os.listdir(path))
    if random_files := [name for name in names if re.match(r"rng_state(_\d+)?\.pth$", name)]:
        others["rng"] = f"{', '.join(random_files)[:200]}: random state starts from this run's seed"
    if "scaler.pt" in names:
        others["scaler.pt"] = "the loss scale of mixed precision adapts again within a few steps"
    return ForeignState(
        optimizer=attempt(lambda: read_state(os.path.join(path, "optimizer.pt"))),
        scheduler=attempt(lambda: read_state(os.path.join(path, "scheduler.pt"))),
        progress=progress,
        others=others,
    )


def _other_entries(state: Mapping[str, Any]) -> dict[str, str]:
    others = {}
    if state.get("best_model_checkpoint") is not None or state.get("best_metric") is not None:
        others["best checkpoint"] = "the best is chosen among the checkpoints of this run"
    if state.get("log_history"):
        others["log history"] = "this run starts a new history"
    callbacks = state.get("stateful_callbacks")
    names = sorted(set(callbacks) - {"TrainerControl"}) if isinstance(callbacks, dict) else []
    if names:
        others["callbacks"] = f"{', '.join(map(str, names))[:200]} start fresh"
    return others


# --- our layout without a format version


def _of_unversioned(path: str, rank: int, world_size: int) -> ForeignState:
    saved_by = attempt(lambda: _json_object(os.path.join(path, MANIFEST_NAME)).get("world_size"))
    # Files per rank belong to the same ranks only if the number of ranks is unchanged.
    has_own_files = saved_by == world_size

    def read(key: str) -> Any | LeftOut:
        name = _file_of(path, key, rank if has_own_files else None)
        if isinstance(name, LeftOut):
            return name
        return attempt(lambda: read_state(os.path.join(path, name)))

    # An unreadable trainer state still leaves the step in the name of the directory, but no epoch.
    trainer = read("trainer")
    named = _step_in_name(path, trainer)
    optimizer_file = _file_of(path, "optimizer", rank)
    return ForeignState(
        optimizer=read("optimizer"),
        scheduler=read("scheduler"),
        progress=attempt(lambda: _progress(trainer, path)) if named is None else named,
        others=_other_files(path),
        is_per_rank=isinstance(optimizer_file, str) and "_rank_" in optimizer_file,
    )


def _file_of(path: str, key: str, rank: int | None) -> str | LeftOut:
    """Return the state file of a component: the shared file, or the file of `rank`."""
    names = [name for name in sorted(os.listdir(path)) if _key_of(name) == key]
    for name in (f"{key}_state.pt", f"{key}_state_rank_{rank}.pt"):
        if name in names:
            return name
    if not names:
        return LeftOut("the directory has no state for it")
    return LeftOut(
        f"{', '.join(names)[:200]} belong to single ranks of a job with a different number or grouping of ranks; import "
        "with the same ranks to keep it"
    )


def _key_of(name: str) -> str | None:
    match = _STATE_FILE.fullmatch(name)
    return match.group(1) if match else None


def _other_files(path: str) -> dict[str, str]:
    keys = {_key_of(name) for name in os.listdir(path)} - {None, "model", "optimizer", "scheduler", "trainer"}
    reasons = {
        "rng": "random state starts from this run's seed",
        "dataset": "only the loader that saved a position can restore it",
    }
    return {key: reasons.get(key, "it is of an unknown kind") for key in sorted(map(str, keys))}


def _step_in_name(path: str, trainer: Any | LeftOut) -> Progress | None:
    """Return the step in the directory name, if the trainer's state is not readable."""
    match = _STEP_IN_NAME.fullmatch(os.path.basename(os.path.abspath(path)))
    return Progress(int(match.group(1)), None) if isinstance(trainer, LeftOut) and match else None


# --- parts of both


def _json_object(path: str) -> dict[str, Any]:
    data = strict_json.loads(read_small_file(path), path)
    if type(data) is not dict:
        raise CheckpointLoadError(f"{path} does not contain a JSON object")
    return data


def _progress(state: Any, path: str) -> Progress:
    """Return the step and the epoch in a trainer's state, or in a dict one level below."""
    if isinstance(state, LeftOut):
        raise CheckpointLoadError(state.reason)
    levels = [state, *(state.values() if isinstance(state, dict) else ())]
    for level in levels:
        if isinstance(level, dict) and "global_step" in level:
            return Progress(_step(level["global_step"], path), _epoch(level.get("epoch", level.get("raw_epoch"))))
    raise CheckpointLoadError(f"the state of the trainer in {path} has no global_step")


def _step(value: Any, path: str) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST_STEP:
        raise CheckpointLoadError(f"the global_step in {path} is not a valid number of steps")
    return value


def _epoch(value: Any) -> float | None:
    is_epoch = type(value) in (int, float) and math.isfinite(value) and 0 <= value <= _LARGEST_STEP
    return float(value) if is_epoch else None
