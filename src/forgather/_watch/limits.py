"""Phases of a rank, and the time that a rank may spend in each without a new note.

A limit that the user leaves open is ten times the median of the last 50 durations, and at least a minute. Until five
durations are known, the limit of the set-up applies. The watcher of each rank measures its durations.
"""

import statistics
from collections import deque
from dataclasses import dataclass, field

from forgather._watch.board import BATCHES, PHASE, STEP

(
    OUTSIDE,
    SETUP,
    LOADING,
    FORWARD_BACKWARD,
    REDUCE,
    OPTIMIZER,
    EVALUATION_START,
    EVALUATION,
    SAVING,
    AFTER_STEP,
    CALLBACK,
) = range(11)

LABELS = {
    OUTSIDE: "code outside of training",
    SETUP: "set-up",
    LOADING: "loading data",
    FORWARD_BACKWARD: "forward/backward",
    REDUCE: "reduce",
    OPTIMIZER: "optimizer",
    EVALUATION_START: "evaluation",
    EVALUATION: "evaluation",
    SAVING: "saving",
    AFTER_STEP: "the work after a step",
    CALLBACK: "a callback",
}

_LEAST_SECONDS = 60.0
_FACTOR = 10.0
_NUM_DURATIONS = 50
_LEAST_DURATIONS = 5


@dataclass(kw_only=True)
class Limits:
    """Limits in seconds, named like the arguments. None is replaced by a multiple of the median."""

    setup_timeout: float = 1800.0
    step_timeout: float | None = None
    save_timeout: float = 3600.0
    data_timeout: float = 600.0
    evaluation_timeout: float | None = None
    least: float = _LEAST_SECONDS
    """Lower bound of limits that follow the median."""

    def of(self, phase: int, durations: "Durations") -> tuple[float, str]:
        """Return the limit of a phase and the name of the argument that sets it."""
        if phase in (FORWARD_BACKWARD, REDUCE, OPTIMIZER, AFTER_STEP):
            return self._measured("step_timeout", durations.steps)
        if phase == EVALUATION:
            return self._measured("evaluation_timeout", durations.batches)
        # A handler may legitimately take minutes, so no median limits it.
        explicit = {CALLBACK: "step_timeout", EVALUATION_START: "evaluation_timeout"}.get(phase)
        if explicit is not None and getattr(self, explicit) is not None:
            return getattr(self, explicit), explicit
        name = {LOADING: "data_timeout", SAVING: "save_timeout"}.get(phase, "setup_timeout")
        return getattr(self, name), name

    def _measured(self, name: str, seconds: "deque[float]") -> tuple[float, str]:
        explicit: float | None = getattr(self, name)
        if explicit is not None:
            return explicit, name
        if len(seconds) < _LEAST_DURATIONS:
            return self.setup_timeout, "setup_timeout"
        return max(_FACTOR * statistics.median(seconds), self.least), name


@dataclass
class Durations:
    """Durations of steps and of evaluation batches of one rank, from its counters."""

    steps: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_DURATIONS))
    batches: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_DURATIONS))
    _step: tuple[int, float] | None = None
    _batch: tuple[int, float] | None = None

    def observe(self, cells: "memoryview", now: float) -> None:
        """Note the counters of a slot; several counts between two looks share the time between them."""
        self._step = _advance(self.steps, self._step, cells[STEP], now)
        if cells[PHASE] == EVALUATION:
            self._batch = _advance(self.batches, self._batch, cells[BATCHES], now)
        elif cells[PHASE] != LOADING:
            # The time between two evaluations is not the duration of a batch.
            self._batch = None


def _advance(
    seconds: "deque[float]", before: tuple[int, float] | None, count: int, now: float
) -> tuple[int, float] | None:
    if before is None or before[0] == 0 or count < before[0]:
        # The time before the first count is the set-up.
        return (count, now) if before is None or count != before[0] else before
    if count == before[0]:
        return before
    number = count - before[0]
    seconds.extend([(now - before[1]) / number] * min(number, _NUM_DURATIONS))
    return count, now
