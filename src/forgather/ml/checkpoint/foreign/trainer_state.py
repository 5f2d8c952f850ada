"""trainer_state.json in the format of transformers, for tools that read `<output_dir>/checkpoint-N`.

Every value is valid JSON: NaN and infinity become null. Trainers add the file to a save with
`checkpoint_layout="output_dir"`. A resume by Forgather does not read it.
"""

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

# Exactly the fields that transformers' `TrainerState.load_from_json` accepts: it raises for any other.
_COPIED = (
    "epoch",
    "global_step",
    "logging_steps",
    "eval_steps",
    "save_steps",
    "train_batch_size",
    "num_train_epochs",
    "num_input_tokens_seen",
    "total_flos",
    "log_history",
    "best_metric",
    "best_model_checkpoint",
    "is_local_process_zero",
    "is_world_process_zero",
    "is_hyper_param_search",
    "trial_name",
    "trial_params",
)
_STEP = re.compile(r"checkpoint-(\d+)")


def trainer_state_bytes(state: object, max_steps: int, callbacks: Iterable[object]) -> bytes:
    """Return the file for a trainer's `state`; `max_steps` is the planned number of steps of the run."""
    data = {name: getattr(state, name, None) for name in _COPIED}
    data["max_steps"] = max_steps
    data["best_global_step"] = _step_of(data["best_model_checkpoint"])
    data["stateful_callbacks"] = _exported(callbacks)
    return (json.dumps(_plain(data), indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def _step_of(path: str | None) -> int | None:
    match = None if path is None else _STEP.match(os.path.basename(os.path.normpath(path)))
    return None if match is None else int(match.group(1))


def _exported(callbacks: Iterable[object]) -> dict[str, Any]:
    """Return the states of callbacks with transformers' interface `ExportableState`; equal names form a list."""
    # transformers' own trainer needs the entry of its control to resume from this directory.
    flags = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
    states: dict[str, Any] = {"TrainerControl": {"args": dict.fromkeys(flags, False), "attributes": {}}}
    for callback in callbacks:
        export = getattr(callback, "state", None)
        if callable(export) and hasattr(callback, "from_state"):
            name, state = type(callback).__name__, export()
            if name not in states:
                states[name] = state
            elif isinstance(states[name], list):
                states[name].append(state)
            else:
                states[name] = [states[name], state]
    return states


def _plain(value: Any) -> Any:
    """Return a value as JSON data. Callbacks may have logged tensors and NumPy numbers."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
