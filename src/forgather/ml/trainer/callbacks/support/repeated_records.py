"""RepeatedRecords: detects log records that a logger receives a second time.

`JsonLogger` and `TBLogger` handle both `on_log` and `on_evaluate`, and skip repeated records.
"""

from collections.abc import Mapping
from typing import Any


class RepeatedRecords:
    """Detector of evaluations that a trainer reports twice, in `on_log` and in `on_evaluate`, in either order."""

    def __init__(self) -> None:
        self._step = -1
        self._record: dict[str, Any] = {}

    def is_repeated(self, step: int, record: Mapping[str, Any]) -> bool:
        """Return whether the previous record of this step has all entries, except `epoch`, which only logs have."""
        values = {name: value for name, value in record.items() if name != "epoch"}
        if step == self._step and values.items() <= self._record.items():
            return True
        self._step, self._record = step, values
        return False
