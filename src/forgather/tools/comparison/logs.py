"""Logged numbers of two runs: the first step with a loss, gradient norm or learning rate that differs in any bit.

Logs contain the shortest text that reads back as the same float64, so equal text means equal bits. NaN and infinities
are null in logs. A step that a restarted run logged twice counts with its later record.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forgather.ml.trainer.callbacks.json_logger import FILE_NAME, read_records

COMPARED = ("loss", "grad_norm", "learning_rate", "eval_loss")
"""Numbers that are compared, the most important first."""


@dataclass(frozen=True)
class NumberDifference:
    """First step where a logged number differs; None stands for NaN or infinity."""

    name: str
    step: int
    first: float | None
    second: float | None


@dataclass(frozen=True)
class LogComparison:
    """Comparison of the logs of two runs."""

    last_steps: tuple[int | None, int | None]
    """Last logged step of each run; None without a log."""
    num_compared: int = 0
    """Number of steps that both runs have logged over the same interval."""
    last_compared: int | None = None
    different_intervals: bool = False
    """Whether steps were left out because the runs log at different intervals."""
    differences: tuple[NumberDifference, ...] = field(default=())
    """The first difference of each number, by step."""

    equal_until: int | None = None
    """Last compared step before the first difference."""

    @property
    def first(self) -> NumberDifference | None:
        return self.differences[0] if self.differences else None


_Steps = dict[int, dict[str, float | None]]


def compare_logs(first_dir: str, second_dir: str) -> LogComparison:
    """Compare the training logs of two output directories."""
    first, second = _by_step(first_dir), _by_step(second_dir)
    common = [step for step in sorted(first) if step in second]
    # A logged loss is the mean since the log before, so it can be compared only over the same steps.
    before = [_previous(steps) for steps in (first, second)]
    same = [step for step in common if before[0][step] == before[1][step]]
    found = [one for name in COMPARED if (one := _first_difference(name, same, first, second)) is not None]
    found.sort(key=lambda one: (one.step, COMPARED.index(one.name)))
    stop = found[0].step if found else None
    equal = [step for step in same if stop is None or step < stop]
    return LogComparison(
        (max(first, default=None), max(second, default=None)),
        len(same),
        same[-1] if same else None,
        len(same) < len(common),
        tuple(found),
        equal[-1] if equal else None,
    )


def _by_step(output_dir: str) -> _Steps:
    """Return the compared numbers by step."""
    path = os.path.join(output_dir, FILE_NAME)
    steps: _Steps = {}
    for record in read_records(path) if os.path.lexists(path) else []:
        # The record at the end of a run has totals, and no numbers of a step.
        if "train_runtime" not in record:
            numbers = {name: _number(record[name]) for name in COMPARED if name in record}
            steps.setdefault(record["step"], {}).update(numbers)
    return steps


def _previous(steps: _Steps) -> dict[int, int | None]:
    trained = sorted(step for step, numbers in steps.items() if "loss" in numbers)
    before: dict[int, int | None] = dict.fromkeys(steps)
    before.update(zip(trained[1:], trained, strict=False))
    return before


def _first_difference(
    name: str,
    steps: Sequence[int],
    first: Mapping[int, Mapping[str, float | None]],
    second: Mapping[int, Mapping[str, float | None]],
) -> NumberDifference | None:
    for step in steps:
        if name in first[step] and name in second[step]:
            values = first[step][name], second[step][name]
            # As text: 0.0 and -0.0 are equal as numbers, but differ in a bit.
            if repr(values[0]) != repr(values[1]):
                return NumberDifference(name, step, *values)
    return None


def _number(value: object) -> float | None:
    """Return a logged number; None for other types, and for integers that no float can hold."""
    try:
        return float(value) if isinstance(value, (int, float)) else None
    except OverflowError:
        return None
