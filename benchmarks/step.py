"""Step benchmark: overhead of a training step over a bare torch loop, for Forgather and other trainers in one process.

    python benchmarks/step.py [--sizes nano 1M 10M] [--rounds 60] [--starts 7] [--threads 1] [--markdown FILE]

All loops stay alive, each in a separate thread, and exactly one thread runs. They take turns in blocks of steps, so
that other load on the machine affects all of them equally. The time to the first step is measured in fresh processes,
which take turns too. Contenders with a missing package are skipped. Lightning is not a dependency of this project. To
include it without changing the environment, install it in a separate directory. Omit its dependencies, since they would
install another torch:

    pip install --target DIRECTORY --no-deps lightning lightning-utilities pytorch-lightning torchmetrics
    PYTHONPATH=DIRECTORY python benchmarks/step.py
"""

import argparse
import contextlib
import gc
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from result_table import ResultTable, write_markdown
from rich.console import Console
from step_contenders import BARE, LOGGING_STEPS, OURS, SIZES, Decoder, Size, Task, installed, run
from step_malloc import malloc_table

MS = 1e3
_CLOCKS = ("wall", "cpu")
# One malloc arena that never returns memory to the system. Otherwise the cost of an allocation differs between threads
# and between steps.
_MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_TOP_PAD_": str(2**26),
}
_BLOCK_SECONDS = 0.1
_WARMUP_STEPS = 5 * LOGGING_STEPS


@dataclass(frozen=True)
class Cost:
    """Seconds of a step, or of the time to the first step."""

    wall: float
    cpu: float


class _Stop(BaseException):
    """Raised inside a training loop to end it. It is not an Exception, since loops may catch those."""


class Runner:
    """Contender in a thread that is blocked except during `take_steps`."""

    def __init__(self, name: str, task: Task, run: Callable[[str, Task], None] = run) -> None:
        self.name = name
        self.task = task
        task.on_step = self._on_step
        self._run = run
        self._begin, self._end = threading.Semaphore(0), threading.Semaphore(0)
        self._num_left = 0
        self._is_over = False
        self._error: BaseException | None = None
        self._started = self._ended = (0.0, 0.0)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()
        self._wait()

    def take_steps(self, num_steps: int) -> Cost:
        """Take `num_steps` steps and return the mean cost of one."""
        self._num_left = num_steps
        self._begin.release()
        self._wait()
        wall, cpu = (end - start for start, end in zip(self._started, self._ended, strict=True))
        return Cost(wall / num_steps, cpu / num_steps)

    def close(self) -> None:
        self._is_over = True
        self._begin.release()
        self._thread.join()

    def _wait(self) -> None:
        self._end.acquire()
        if self._error is not None:
            raise RuntimeError(f"{self.name} failed") from self._error

    def _work(self) -> None:
        try:
            self._run(self.name, self.task)
        except _Stop:
            pass
        except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
            self._error = error
            self._end.release()

    def _on_step(self) -> None:
        if self._num_left > 0:
            self._num_left -= 1
            return
        self._ended = _clocks()
        self._end.release()
        self._begin.acquire()
        if self._is_over:
            raise _Stop
        # The first step of the block lasts from here to the next call.
        self._num_left -= 1
        self._started = _clocks()


def _clocks() -> tuple[float, float]:
    # Only one contender runs at a time, so the CPU time of the process belongs to it, including all its threads.
    return time.perf_counter(), time.process_time()


def main() -> None:
    arguments = _parse_arguments()
    _require_settings(arguments.threads)
    names = [name for name in installed() if arguments.only is None or name in (BARE, OURS, *arguments.only)]
    console = Console(width=None if sys.stdout.isatty() else 140)
    known = facts(names, arguments.rounds, arguments.threads)
    console.print(*known, sep="\n", highlight=False, soft_wrap=True)
    tables = []
    for size in (size for size in SIZES if size.name in arguments.sizes):
        tables.append(_measure_size(size, names, arguments.rounds))
        console.print(tables[-1].as_rich())
    if arguments.malloc_rounds > 0:
        for name in arguments.malloc_sizes:
            tables.append(malloc_table(name, arguments.malloc_rounds))
            console.print(tables[-1].as_rich())
    if arguments.starts > 0:
        tables.append(_start_table(_measure_starts(names, arguments.starts)))
        console.print(tables[-1].as_rich())
    console.print(*_NOTES, sep="\n", highlight=False, soft_wrap=True)
    if arguments.markdown:
        write_markdown(arguments.markdown, known, tables, _NOTES)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [size.name for size in SIZES]
    parser.add_argument("--sizes", nargs="*", choices=names, default=names)
    parser.add_argument("--rounds", type=int, default=60, help="blocks of steps per contender and size")
    parser.add_argument("--starts", type=int, default=7, help="fresh processes per contender")
    parser.add_argument(
        "--malloc-rounds", type=int, default=3, help="fresh processes per loop, with and without tuning"
    )
    parser.add_argument("--malloc-sizes", nargs="*", choices=names, default=["1M", "10M"])
    parser.add_argument("--threads", type=int, default=1, help="torch threads within an operation")
    parser.add_argument("--only", nargs="+", help="contenders besides the bare loop and Forgather")
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    return parser.parse_args()


def settings(num_threads: int) -> dict[str, str]:
    """Return environment variables that libraries read at process start."""
    return {**_MALLOC, "OMP_NUM_THREADS": str(num_threads), "TOKENIZERS_PARALLELISM": "false"}


def _require_settings(num_threads: int) -> None:
    """Restart this program unless its environment has the settings."""
    required = settings(num_threads)
    if any(os.environ.get(name) != value for name, value in required.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **required})


def facts(names: Sequence[str], num_rounds: int, num_threads: int) -> list[str]:
    """Return lines about the machine, the package versions and the number of rounds."""
    packages = ["torch", *(one for one in ("transformers", "accelerate", "lightning") if _is_used(one, names))]
    versions = ", ".join(f"{package} {metadata.version(package)}" for package in packages)
    load = os.getloadavg()[0]
    return [
        f"{len(os.sched_getaffinity(0))} cores, load {load:.1f} before the start; torch with {num_threads} thread(s)",
        f"Python {platform.python_version()}, {versions}",
        f"median of {num_rounds} rounds (10th to 90th percentile); logging every {LOGGING_STEPS} steps, to a file",
    ]


def _is_used(package: str, names: Sequence[str]) -> bool:
    return any(package in name.lower() for name in names)


# --- steps


def _measure_size(size: Size, names: Sequence[str], num_rounds: int) -> ResultTable:
    with tempfile.TemporaryDirectory() as directory, _quiet(Path(directory, "output.txt")):
        runners = [Runner(name, Task(size, str(Path(directory, str(i))))) for i, name in enumerate(names)]
        costs = take_turns(runners, num_rounds)
        for runner in runners:
            runner.close()
    return _step_table(title_of(size), costs)


def title_of(size: Size, num_ranks: int = 1) -> str:
    """Return the title of the table for a model size."""
    num_parameters = sum(one.numel() for one in Decoder(size).parameters())
    shape = f"{size.batch_size * num_ranks} x {size.sequence_length}"
    return f"One step of {size.name}: {num_parameters:,} parameters, batch {shape}"


def take_turns(runners: Sequence[Runner], num_rounds: int) -> dict[str, list[Cost]]:
    """Return the cost of a step for each runner, in each round."""
    warm_costs = [runner.take_steps(_WARMUP_STEPS) for runner in runners]
    gc.collect()
    # Objects from the imports of one contender must not slow down garbage collection in the others.
    gc.freeze()
    num_logs = round(_BLOCK_SECONDS / min(cost.wall for cost in warm_costs) / LOGGING_STEPS)
    num_steps = LOGGING_STEPS * max(1, num_logs)
    costs: dict[str, list[Cost]] = {runner.name: [] for runner in runners}
    order = random.Random(0)
    for _ in range(num_rounds):
        for runner in order.sample(runners, len(runners)):
            costs[runner.name].append(runner.take_steps(num_steps))
    return costs


@contextlib.contextmanager
def _quiet(path: Path) -> Iterator[None]:
    """Redirect the output of the trainers to a file, as in a job."""
    with path.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        yield


def _step_table(title: str, costs: dict[str, list[Cost]]) -> ResultTable:
    columns = ["", "wall ms", "CPU ms", "CPU ms over bare", "95% interval"]
    rows = []
    for name, rounds in costs.items():
        # Compare within a round: a disturbance usually lasts longer than a turn.
        extra = [(one.cpu - bare.cpu) * MS for one, bare in zip(rounds, costs[BARE], strict=True)]
        low, high = interval_of_median(extra)
        wall, cpu = spread([one.wall * MS for one in rounds]), spread([one.cpu * MS for one in rounds])
        compared = ["", ""] if name == BARE else [f"{statistics.median(extra):+.3f}", f"{low:+.3f} to {high:+.3f}"]
        rows.append([name, wall, cpu, *compared])
    return ResultTable(title, columns, rows, OURS)


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """Return a distribution-free 95% interval of the median: order statistics chosen by the sign test."""
    ordered, count = sorted(values), len(values)
    reach = 0.98 * count**0.5
    low, high = round(count / 2 - reach) - 1, round(count / 2 + reach)
    return ordered[max(low, 0)], ordered[min(high, count - 1)]


def spread(values: Sequence[float], num_digits: int = 3) -> str:
    """Return the median as text, followed by the 10th and the 90th percentile."""
    if len(values) < 2:
        return f"{values[0]:.{num_digits}f}"
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    low, median, high = (f"{value:.{num_digits}f}" for value in (deciles[0], statistics.median(values), deciles[-1]))
    return f"{median} ({low}-{high})"


# --- starts


def _measure_starts(names: Sequence[str], num_starts: int) -> dict[str, list[Cost]]:
    costs: dict[str, list[Cost]] = {name: [] for name in names}
    order = random.Random(0)
    # The first round reads the files of all packages into the page cache.
    for number in range(num_starts + 1):
        for name in order.sample(list(names), len(names)):
            cost = _measure_start(name)
            if number > 0:
                costs[name].append(cost)
    return costs


def _measure_start(name: str) -> Cost:
    command = [sys.executable, str(Path(__file__).with_name("step_contenders.py")), name]
    # Keep compiled bytecode. Without it, each start would compile Forgather from source, but not the installed packages.
    variables = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
    with tempfile.TemporaryFile("w+") as log:
        started = time.perf_counter()
        with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=log, text=True) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            wall = time.perf_counter() - started
        if not line or process.returncode != 0:
            log.seek(0)
            raise RuntimeError(f"{name} did not reach its first step:\n{log.read()}")
    return Cost(wall, float(line))


def _start_table(costs: dict[str, list[Cost]]) -> ResultTable:
    columns = ["", "wall s", "CPU s", "wall / bare", "CPU / bare"]
    rows = []
    for name, rounds in costs.items():
        pairs = list(zip(rounds, costs[BARE], strict=True))
        ratios = [
            statistics.median(getattr(one, clock) / getattr(bare, clock) for one, bare in pairs) for clock in _CLOCKS
        ]
        spreads = [spread([getattr(one, clock) for one in rounds], 2) for clock in _CLOCKS]
        rows.append([name, *spreads, *(f"{ratio:.2f}" for ratio in ratios)])
    return ResultTable("Time from process start to the end of the first step, nano", columns, rows, OURS)


MALLOC_NOTE = f"malloc for all: {' '.join(f'{name}={value}' for name, value in _MALLOC.items())}"
_NOTES = [
    "CPU: time of all threads of the process. over bare: median of the differences within each round.",
    "Every loop logs the loss in its usual way, with its default callbacks and progress bars. No loop saves or clips "
    "gradients. Forgather also measures the gradient norm at every step; a second bare loop does the same.",
    MALLOC_NOTE,
    "The tables of malloc thresholds are measured in fresh processes without these settings.",
]


if __name__ == "__main__":
    main()
