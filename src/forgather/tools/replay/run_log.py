"""RunLog: log records of a run, from the next checkpoint or from its log file."""

import os
from collections.abc import Mapping
from typing import Any

from forgather.ml.trainer.callbacks.json_logger import FILE_NAME, read_records
from forgather.tools.replay.report import LoggedStep
from forgather.tools.run_files import RunFiles, state_of


class RunLog:
    """Log records of the training steps of a run, by step."""

    def __init__(self, run: RunFiles) -> None:
        self._run = run
        self._of_file: dict[int, Mapping[str, Any]] | None = None

    def record(self, step: int) -> Mapping[str, Any] | None:
        """Return the record that the run logged at a step, or None."""
        after = self._run.after(step)
        history = [] if after is None else state_of(after, "trainer")["state"]["log_history"]
        # The history of a checkpoint keeps NaN and infinities, which JSON does not have.
        for record in history:
            if record.get("step") == step and _is_of_training(record):
                found: Mapping[str, Any] = record
                return found
        if self._of_file is None:
            self._of_file = self._read()
        return self._of_file.get(step)

    def compared(self, step: int, replayed: Mapping[str, Any] | None) -> LoggedStep | None:
        """Return the record of the run beside the record of a replay; None if either is missing."""
        record = self.record(step)
        if record is None or replayed is None:
            return None
        return LoggedStep(record.get("loss"), record.get("grad_norm"), replayed.get("loss"), replayed.get("grad_norm"))

    def _read(self) -> dict[int, Mapping[str, Any]]:
        path = os.path.join(self._run.output_dir, FILE_NAME)
        records = read_records(path) if os.path.lexists(path) else []
        return {
            record["step"]: record for record in records if type(record.get("step")) is int and _is_of_training(record)
        }


def _is_of_training(record: Mapping[str, Any]) -> bool:
    return "grad_norm" in record and "train_runtime" not in record
