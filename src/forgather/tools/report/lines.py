"""Lines of a run as a report reads them: from the run record, the JSON log, or the state file of transformers.

Files may be damaged or hostile: a line without a plausible step and time is dropped.
"""

import json
import logging
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

from forgather._run_files import open_in_run, read_at_most
from forgather.ml.checkpoint.files.layout import CHECKPOINTS_FOLDER, TRAINER_STATE_NAME
from forgather.ml.trainer.callbacks import json_logger
from forgather.ml.trainer.callbacks.support.record_file import FILE_NAME as RECORD_NAME
from forgather.ml.trainer.callbacks.support.record_file import Line, read_lines

logger = logging.getLogger(__name__)

LARGEST_STEP = 2**53
"""Largest plausible number of a step, a stage or a second."""
_LATEST_TIME = 1e11
_MOST_STATE_BYTES = 32 * 2**20


def find_lines(output_dir: str) -> tuple[str, list[Line]]:
    """Return the best source of a run's values, by its file name, and its lines; "" without one."""
    for name, read in ((RECORD_NAME, _record), (json_logger.FILE_NAME, _log), (TRAINER_STATE_NAME, _trainer_state)):
        if lines := read(output_dir):
            return name, lines
    return "", []


def number(value: object) -> float | None:
    """Return a number of a file as float, None for other types, and for integers that no float can hold."""
    try:
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    except OverflowError:
        return None


def whole_number(value: object) -> int:
    """Return a count of a file; 0 for other types, NaN and infinities."""
    found = number(value)
    return int(found) if found is not None and math.isfinite(found) else 0


def time_of(value: object) -> float | None:
    """Return a plausible time of a file in seconds since 1970, None for anything else."""
    found = number(value)
    return found if found is not None and 0 < found < _LATEST_TIME else None


def text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _record(output_dir: str) -> list[Line]:
    lines = _lines_of(os.path.join(output_dir, RECORD_NAME))
    return [line for line in lines if isinstance(line.get("kind"), str) and _is_plausible(line, needs_time=True)]


def _log(output_dir: str) -> list[Line]:
    lines = _lines_of(os.path.join(output_dir, json_logger.FILE_NAME))
    return _with_kinds(line for line in lines if _is_plausible(line, needs_time=True))


def _lines_of(path: str) -> Sequence[Any]:
    """Return the lines of a file; none if it cannot be read."""
    try:
        return read_lines(path)
    except OSError as error:
        logger.warning("%s cannot be read: %s", path, error.strerror or error)
        return []


def _trainer_state(output_dir: str) -> list[Line]:
    """Return the log history of the newest checkpoint that has a state file of transformers."""
    folders = (output_dir, os.path.join(output_dir, CHECKPOINTS_FOLDER))
    paths = [
        os.path.join(folder, name, TRAINER_STATE_NAME)
        for folder in folders
        if os.path.isdir(folder)
        for name in os.listdir(folder)
    ]
    paths = [path for path in (os.path.join(output_dir, TRAINER_STATE_NAME), *paths) if os.path.isfile(path)]
    for path in sorted(paths, key=os.path.getmtime, reverse=True):
        if lines := _with_kinds(line for line in _history(output_dir, path) if _is_plausible(line, needs_time=False)):
            return lines
    return []


def _history(output_dir: str, path: str) -> Sequence[Any]:
    try:
        with open_in_run(output_dir, os.path.relpath(path, output_dir)) as file:
            content = json.loads(read_at_most(file, _MOST_STATE_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("%s cannot be read: %s", path, error)
        return []
    history = content.get("log_history") if isinstance(content, dict) else None
    return history if isinstance(history, list) else []


def _is_plausible(line: object, needs_time: bool) -> bool:
    if not isinstance(line, dict):
        return False
    step, has_time = line.get("step"), time_of(line.get("time")) is not None
    has_step = type(step) is int and 0 <= step < LARGEST_STEP
    return has_step and (has_time or not (needs_time or "time" in line))


def _with_kinds(lines: Iterable[Line]) -> list[Line]:
    """Return log lines in the form of a run record: a record with evaluation metrics is an evaluation."""
    return [{**line, "kind": "evaluate" if any(name.startswith("eval_") for name in line) else "log"} for line in lines]
