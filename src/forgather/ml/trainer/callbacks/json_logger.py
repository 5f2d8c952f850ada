"""JsonLogger callback: appends log and evaluation records to a JSON Lines file.

Invariant: after a resume, the file has each record once, as in an uninterrupted run. It is one of the default callbacks.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from forgather._run_files import append_line, last_lines, open_in_run, remove_lines
from forgather.ml.checkpoint.files.durable import make_directories
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.callbacks.support.json_values import to_json
from forgather.ml.trainer.callbacks.support.repeated_records import RepeatedRecords
from forgather.ml.trainer.trainer_types import TrainerCallback, TrainerControl, TrainerState

logger = logging.getLogger(__name__)

FILE_NAME = "trainer_logs.jsonl"

_Kind = tuple[int, frozenset[str]]
"""Step and keys of a record."""


class JsonLogger(TrainerCallback):
    """Callback that appends each log and evaluation record as one line to `<output_dir>/trainer_logs.jsonl`.

    Each record has `step` and `time` (seconds since 1970). NaN and infinities become null, because JSON has no such
    numbers. A resumed run continues the file, and first drops the records of steps after the checkpoint, which will be
    repeated. A fresh run starts a new file and renames the old file to `trainer_logs.previous.jsonl`.

    With `evaluations_alone=False`, evaluations before training are written when training begins. Then `evaluate()`
    without `train()` creates no file. If the file cannot be written, the callback warns once and training continues.
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
        self._inherited: set[_Kind] = set()
        """Records at the step of the checkpoint. Those logged after the save will be logged again by the resumed run."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if not state.is_world_process_zero:
            return
        # At step 0, a file that this process has written (an evaluation before training) belongs to this run.
        is_fresh = state.global_step == 0 and not self._has_written
        self._guarded(lambda: self._begin(*self._place(args), state.global_step, is_fresh))
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

    def _place(self, args: TrainingArguments) -> tuple[str, str]:
        """Return the folder and the name of the file; a user may have chosen one outside the run."""
        return os.path.split(self._file_name) if os.path.isabs(self._file_name) else (args.output_dir, self._file_name)

    def _begin(self, folder: str, name: str, step: int, is_fresh: bool) -> None:
        self._inherited = set()
        path = os.path.join(folder, name)
        if not os.path.isfile(path):
            return
        if is_fresh:
            # One old file is kept, because a run started in the wrong directory must not destroy a log.
            base, extension = os.path.splitext(path)
            os.replace(path, f"{base}.previous{extension}")
            return

        def is_kept(record: dict[str, Any]) -> bool:
            if record["step"] == step:
                self._inherited.add(_kind(record))
            return bool(record["step"] <= step)

        keep_records(folder, name, is_kept)

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
        folder, name = self._place(args)
        # The killed process may have logged this record after its last save. Log and evaluation records of one step
        # differ in their keys, so equal keys mean that the resumed run repeats the record.
        if (kind := _kind(record)) in self._inherited:
            self._inherited.remove(kind)
            keep_records(folder, name, lambda old: _kind(old) != kind)
        append_line(folder, name, json.dumps(record, allow_nan=False))

    def _guarded(self, write: Callable[[], None]) -> None:
        """Run `write`, and turn an OSError into one warning."""
        # A full disk or missing write permission must not end training.
        try:
            write()
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "The log file cannot be written (%s). Training continues, but records are missing from %s. Free disk "
                    "space, or choose a writable output_dir.",
                    *(error, self._file_name),
                )


def read_records(path: str) -> Iterator[dict[str, Any]]:
    """Yield the records at the end of a log file, in order; damaged lines are skipped.

    A killed or running process leaves an incomplete line.
    """
    with open_in_run(*os.path.split(path)) as file:
        yield from (record for _, line in last_lines(file) if (record := _parsed(line)) is not None)


def keep_records(folder: str, name: str, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Remove the other records, and damaged lines, from the end of a log file."""
    remove_lines(folder, name, lambda line: (record := _parsed(line)) is not None and wanted(record))


def _kind(record: Mapping[str, Any]) -> _Kind:
    return record["step"], frozenset(record)


def _parsed(line: bytes) -> dict[str, Any] | None:
    # A kill in the middle of a write leaves a line without its newline. It may still be valid JSON, such as "1".
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    # Not bool, which is an int.
    return record if isinstance(record, dict) and type(record.get("step")) is int else None
