"""Run record (`run_record.jsonl`): append-only JSON lines with everything that happened to a run, for `forgather report`.

Each line has `kind`, `time` (seconds since 1970) and `step`. Lines are never changed after a resume: the reader decides
which steps count. A kill may leave the last line incomplete; the next line then starts on a new line. A file that grows
beyond its limit is thinned. `RunRecorder` writes it, `forgather.tools.report` reads it. Imports no torch.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from forgather._run_files import append_line, last_lines, open_in_run
from forgather.ml.checkpoint.files.durable import make_directories, replace_file

FILE_NAME = "run_record.jsonl"
PREVIOUS_NAME = "run_record.previous.jsonl"
MOST_BYTES = 16 * 2**20
_THINNED = {"log": 4, "samples": 2, "evaluate": 4, "save": 4}
"""Kinds of lines that are thinned, by the size of a group that keeps two lines (one of two for samples)."""
_NAMES = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

Line = dict[str, Any]


class RecordFile:
    """Writer of the run record of one output directory."""

    def __init__(self, output_dir: str, most_bytes: int = MOST_BYTES) -> None:
        self.path = os.path.join(output_dir, FILE_NAME)
        self._output_dir = output_dir
        self._most_bytes = most_bytes
        make_directories(output_dir)

    def append(self, line: Mapping[str, object]) -> None:
        """Append one line; thin the file if it has become too long."""
        text = json.dumps(expressible(line), allow_nan=False, separators=(",", ":"))
        if append_line(self._output_dir, FILE_NAME, text) > self._most_bytes:
            self._thin()

    def set_aside(self) -> None:
        """Rename the record of an earlier run; a run started in the wrong directory must not destroy it."""
        if os.path.isfile(self.path):
            os.replace(self.path, os.path.join(os.path.dirname(self.path), PREVIOUS_NAME))

    def _thin(self) -> None:
        lines = read_lines(self.path)
        size = self._most_bytes
        while size > self._most_bytes // 2:
            fewer = thinned(lines)
            if len(fewer) == len(lines):
                break
            lines = fewer
            content = "".join(f"{json.dumps(expressible(line), separators=(',', ':'))}\n" for line in lines).encode()
            size = len(content)
        else:
            replace_file(self.path, content)


def read_lines(path: str) -> list[Line]:
    """Return the lines of a record or log, without damaged ones; numbers that JSON lacks are floats again."""
    try:
        with open_in_run(*os.path.split(path)) as file:
            return [line for _, raw in last_lines(file) if (line := _parsed(raw)) is not None]
    except FileNotFoundError:
        return []


def thinned(lines: Sequence[Line]) -> list[Line]:
    """Return about half of the frequent lines: of each group the ones with the smallest and the largest loss."""
    dropped: set[int] = set()
    for kind, size in _THINNED.items():
        places = [place for place, line in enumerate(lines) if line.get("kind") == kind]
        for start in range(0, len(places) - size, size):
            group = places[start : start + size]
            dropped.update(set(group) - _kept(lines, group))
    return [line for place, line in enumerate(lines) if place not in dropped]


def _kept(lines: Sequence[Line], group: Sequence[int]) -> set[int]:
    if len(group) == 2:
        return {group[1]}
    # Extremes are kept, so that a spike survives any number of thinnings. A NaN is an extreme too.
    ranked = sorted(group, key=lambda place: _height(lines[place]))
    return {ranked[0], ranked[-1]}


def _height(line: Line) -> float:
    value = line.get("loss", line.get("eval_loss", 0.0))
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else math.inf


def expressible(value: object) -> Any:
    """Convert to JSON types. NaN and infinities become the strings "NaN", "Infinity" and "-Infinity"."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): expressible(item) for key, item in value.items()}
    if isinstance(value, Iterable):
        return [expressible(item) for item in value]
    return str(value)


def _parsed(raw: bytes) -> Line | None:
    if not raw.strip():
        return None
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict):
        return None
    return {name: _NAMES.get(value, value) if isinstance(value, str) else value for name, value in line.items()}
