"""The log of a run as a file of JSON lines."""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from forgather.ml.checkpoint.files.durable import make_directories, replace_file
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.callbacks.support.repeated_records import RepeatedRecords
from forgather.ml.trainer.trainer_types import TrainerCallback, TrainerControl, TrainerState

logger = logging.getLogger(__name__)

FILE_NAME = "trainer_logs.jsonl"


class JsonLogger(TrainerCallback):
    """Appends each log and evaluation record as one line to `<output_dir>/trainer_logs.jsonl`.

    Each record has `step` and `time` (seconds since 1970). NaN and the infinities, which JSON does not have, become null,
    so that every reader accepts the file and sees columns of numbers. A resumed run continues the file: records of
    steps after the checkpoint, which come again, are dropped first. A run that starts fresh begins a new file, and keeps
    the one of the run before as `trainer_logs.previous.jsonl`. `evaluations_alone=False` waits with evaluations before
    training until training begins, so that `evaluate()` alone leaves no file. A file that cannot be written is warned of
    once, and training goes on.
    """

    changes_control = False
    reads_final_metrics = True

    def __init__(self, file_name: str = FILE_NAME, evaluations_alone: bool = True) -> None:
        self._file_name = file_name
        self._records = RepeatedRecords()
        self._has_written = False
        self._has_warned = False
        self._writes_now = evaluations_alone
        self._waiting: list[dict[str, Any]] = []
        self._inherited: list[dict[str, Any]] = []
        """Records of the step of the checkpoint: what follows the checkpoint in the same step comes again."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if not state.is_world_process_zero:
            return
        # at step 0, what this process wrote itself (an evaluation before training) belongs to the run
        is_fresh = state.global_step == 0 and not self._has_written
        self._guarded(lambda: self._begin(self._path(args), state.global_step, is_fresh))
        self._writes_now = True
        for record in self._waiting:
            self._guarded(lambda record=record: self._append(args, record))  # type: ignore[misc]
        self._waiting = []

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any],
        **kwargs: object,
    ) -> None:
        self._write(args, state, logs)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any],
        **kwargs: object,
    ) -> None:
        self._write(args, state, metrics)

    def _path(self, args: TrainingArguments) -> str:
        return os.path.join(args.output_dir, self._file_name)

    def _begin(self, path: str, step: int, is_fresh: bool) -> None:
        self._inherited = []
        if not os.path.isfile(path):
            return
        if is_fresh:
            base, extension = os.path.splitext(path)
            os.replace(path, f"{base}.previous{extension}")
            return
        kept = keep_records(path, lambda record: record.get("step", 0) <= step)
        self._inherited = [record for record in kept if record.get("step") == step]

    def _write(self, args: TrainingArguments, state: TrainerState, values: Mapping[str, Any]) -> None:
        if not state.is_world_process_zero or self._records.is_repeated(state.global_step, values):
            return
        record = to_json({"step": state.global_step, "time": round(time.time(), 3), **values})
        if self._writes_now:
            self._guarded(lambda: self._append(args, record))
        else:
            self._waiting.append(record)

    def _append(self, args: TrainingArguments, record: dict[str, Any]) -> None:
        if not self._has_written:
            make_directories(args.output_dir)
            self._has_written = True
        self._drop_inherited(self._path(args), record)
        # Opened for each line: closing it shows the line to other machines that share the file system.
        with open(self._path(args), "a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")

    def _drop_inherited(self, path: str, record: dict[str, Any]) -> None:
        again = [one for one in self._inherited if one["step"] == record["step"] and one.keys() == record.keys()]
        if again:
            self._inherited = [one for one in self._inherited if one not in again]
            keep_records(path, lambda one: one not in again)

    def _guarded(self, write: Callable[[], None]) -> None:
        """A full disk, or a directory that only others may write to, must not end training."""
        try:
            write()
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "The log file cannot be written (%s); training goes on, and records are missing from %s. Make room, or "
                    "choose an output_dir that can be written to.",
                    *(error, self._file_name),
                )


def to_json(value: object) -> Any:
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


def keep_records(path: str, wanted: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Remove the other records, and a line that a killed process did not finish, in one replacement; returns the rest."""
    with open(path, "rb") as file:
        lines = file.readlines()
    records = [(line, _parsed(line)) for line in lines]
    kept = [(line, record) for line, record in records if record is not None and wanted(record)]
    if len(kept) < len(lines):
        replace_file(path, b"".join(line for line, _ in kept))
    return [record for _, record in kept]


def _parsed(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
