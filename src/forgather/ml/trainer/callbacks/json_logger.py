"""The log of a run as a file of JSON lines."""

import json
import math
import os
import time
from collections.abc import Mapping
from typing import Any

from forgather.ml.checkpoint.durable import make_directories, replace_file
from forgather.ml.trainer.callbacks.repeated_records import RepeatedRecords
from forgather.ml.trainer.trainer_types import TrainerCallback, TrainerState

FILE_NAME = "trainer_logs.jsonl"


class JsonLogger(TrainerCallback):
    """Appends each log and evaluation record as one line to `<output_dir>/trainer_logs.jsonl`.

    Each record has `step` and `time` (seconds since 1970). NaN and the infinities, which JSON does not have, become null,
    so that every reader accepts the file and sees columns of numbers. A resumed run continues the file: records of
    steps after the checkpoint, which come again, are dropped first. A run that starts fresh begins a new file.
    """

    changes_control = False

    def __init__(self, file_name: str = FILE_NAME) -> None:
        self._file_name = file_name
        self._records = RepeatedRecords()
        self._has_written = False

    def on_train_begin(self, args: Any, state: TrainerState, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            # at step 0, what this process wrote itself (an evaluation before training) belongs to the run
            is_fresh = state.global_step == 0 and not self._has_written
            drop_later_records(self._path(args), -1 if is_fresh else state.global_step)

    def on_log(self, args: Any, state: TrainerState, logs: Mapping[str, Any], **kwargs: Any) -> None:
        self._write(args, state, logs)

    def on_evaluate(self, args: Any, state: TrainerState, metrics: Mapping[str, Any], **kwargs: Any) -> None:
        self._write(args, state, metrics)

    def _path(self, args: Any) -> str:
        return os.path.join(args.output_dir, self._file_name)

    def _write(self, args: Any, state: TrainerState, values: Mapping[str, Any]) -> None:
        if not state.is_world_process_zero or self._records.is_repeated(state.global_step, values):
            return
        if not self._has_written:
            make_directories(args.output_dir)
            self._has_written = True
        record = {"step": state.global_step, "time": round(time.time(), 3), **values}
        # Opened for each line: closing it shows the line to other machines that share the file system.
        with open(self._path(args), "a", encoding="utf-8") as file:
            file.write(json.dumps(to_json(record), allow_nan=False) + "\n")


def to_json(value: Any) -> Any:
    """The value in JSON's own types: tensors and arrays as numbers or lists, NaN and infinities as None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if hasattr(value, "tolist"):
        return to_json(value.tolist())
    return str(value)


def drop_later_records(path: str, last_step: int) -> None:
    """Remove the records of steps after `last_step`, and a line that a killed process did not finish, in one replacement."""
    if not os.path.exists(path):
        return
    with open(path, "rb") as file:
        lines = file.readlines()
    kept = [line for line in lines if _is_to_keep(line, last_step)]
    if len(kept) < len(lines):
        replace_file(path, b"".join(kept))


def _is_to_keep(line: bytes, last_step: int) -> bool:
    if not line.endswith(b"\n"):
        return False
    try:
        record = json.loads(line)
    except ValueError:
        return False
    return isinstance(record, dict) and record.get("step", 0) <= last_step
