"""Recognises records that arrive a second time."""

from collections.abc import Mapping
from typing import Any


class RepeatedRecords:
    """Finds evaluations that a trainer reports twice, as a log record and as an evaluation, in either order."""

    def __init__(self) -> None:
        self._step = -1
        self._record: dict[str, Any] = {}

    def is_repeated(self, step: int, record: Mapping[str, Any]) -> bool:
        """Whether the record says nothing beyond the one before it; `epoch`, which only logs have, aside."""
        values = {name: value for name, value in record.items() if name != "epoch"}
        if step == self._step and values.items() <= self._record.items():
            return True
        self._step, self._record = step, values
        return False
