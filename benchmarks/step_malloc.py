"""Page faults of a step with and without `tune_malloc`, in fresh processes without any malloc settings.

    python benchmarks/step_malloc.py NAME SIZE

The command runs one loop and prints steps per second, page faults per step and the peak of resident memory. `step.py`
starts it for all loops in turn and shows the table.
"""

import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from result_table import ResultTable
from step_contenders import SIZES, Task, train_bare, train_ours

_WARMUP_STEPS = 30
_NUM_STEPS = 60
OURS = "Forgather Trainer"


class _Done(BaseException):
    """Raised inside a training loop to end it. It is not an Exception, since loops may catch those."""


def _bare(task: Task) -> None:
    train_bare(task, task.model, task.loader())


def _bare_tuned(task: Task) -> None:
    from forgather.ml.trainer.diagnostics.malloc_settings import tune_malloc

    assert tune_malloc(torch.device("cpu"))
    _bare(task)


def _ours(task: Task, **settings: bool) -> None:
    from forgather.ml.trainer.trainer import Trainer, TrainingArguments

    train_ours(task, Trainer, TrainingArguments, **settings)


_CONTENDERS: dict[str, Callable[[Task], None]] = {
    "bare loop": _bare,
    "bare loop with tuned malloc": _bare_tuned,
    "Forgather Trainer, tune_malloc=False": lambda task: _ours(task, tune_malloc=False),
    OURS: _ours,
}


def malloc_table(size_name: str, num_rounds: int) -> ResultTable:
    """Return the table of all loops, which take turns in fresh processes."""
    found: dict[str, list[list[float]]] = {name: [] for name in _CONTENDERS}
    for _ in range(num_rounds):
        for name, rounds in found.items():
            rounds.append(_measure(name, size_name))
    columns = ["", "steps/s", "page faults per step", "peak resident MB"]
    rows = [[name, *_cells(rounds)] for name, rounds in found.items()]
    return ResultTable(f"malloc thresholds: steps of {size_name}", columns, rows, OURS)


def _measure(name: str, size_name: str) -> list[float]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    command = [sys.executable, str(Path(__file__)), name, size_name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environ)
    values: list[float] = json.loads(done.stdout.splitlines()[-1])
    return values


def _cells(rounds: Sequence[Sequence[float]]) -> list[str]:
    speed, faults, peak = (statistics.median(values) for values in zip(*rounds, strict=True))
    return [f"{speed:.2f}", f"{faults:,.0f}", f"{peak:.0f}"]


def _run(name: str, size_name: str) -> None:
    output, sys.stdout = sys.stdout, sys.stderr
    started: list[float] = []
    count = 0

    def on_step() -> None:
        nonlocal count
        count += 1
        usage = resource.getrusage(resource.RUSAGE_SELF)
        if count == _WARMUP_STEPS:
            started.extend((time.perf_counter(), usage.ru_minflt))
        elif count == _WARMUP_STEPS + _NUM_STEPS:
            seconds, faults = time.perf_counter() - started[0], usage.ru_minflt - started[1]
            values = [_NUM_STEPS / seconds, faults / _NUM_STEPS, usage.ru_maxrss * 1024 / 1e6]
            print(json.dumps(values), file=output, flush=True)
            raise _Done

    size = next(one for one in SIZES if one.name == size_name)
    with tempfile.TemporaryDirectory() as directory, contextlib.suppress(_Done):
        _CONTENDERS[name](Task(size, directory, on_step))


if __name__ == "__main__":
    _run(*sys.argv[1:])
