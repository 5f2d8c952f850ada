"""Pipeline benchmark: overhead of a step on two ranks over a bare loop with torch's schedule; idle time of schedules.

    python benchmarks/pipeline.py [--sizes 1M 10M] [--schedules gpipe 1f1b interleaved1f1b] [--rounds 30] [--markdown FILE]
    python benchmarks/pipeline.py --bubbles

The first command starts the ranks on this machine, with gloo over localhost. On each rank all loops stay alive, each in
a separate thread, and exactly one thread runs. They take turns in blocks of steps, in the same random order on both
ranks. The ranks wait for each other between turns. The second command computes shares of idle time and measures
nothing.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from local_ranks import NUM_THREADS, RANKS_FACT, RESULT_FILE
from pipeline_contenders import (
    BARE,
    BARE_WITH_NORM,
    CONTENDERS,
    NUM_MICROBATCHES,
    NUM_RANKS,
    OURS,
    SCHEDULE_NAMES,
    SIZES,
    make_model,
)
from result_table import ResultTable, write_markdown
from rich.console import Console
from step import MALLOC_NOTE, MS, Cost, facts, settings, spread
from step_contenders import LOGGING_STEPS, Size

from forgather.ml.trainer.pipeline.schedules import SCHEDULES, check_layout
from forgather.ml.trainer.pipeline.schedules.timeline import bubble_share

_NUM_RESAMPLES = 2000
_BUBBLE_LAYOUTS = [(ranks, micro_batches) for ranks in (4, 8) for micro_batches in (8, 16)]


def main() -> None:
    arguments = _parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 160)
    known: list[str] = []
    tables: list[ResultTable] = []
    if arguments.bubbles:
        tables, notes = [_bubble_table()], _BUBBLE_NOTES
        console.print(tables[0].as_rich())
    else:
        known, notes = _facts(arguments.rounds), _STEP_NOTES
        console.print(*known, sep="\n", highlight=False, soft_wrap=True)
        for size in (size for size in SIZES if size.name in arguments.sizes):
            for schedule in arguments.schedules:
                tables.append(_step_table(_title(size, schedule), _measure(size, schedule, arguments.rounds)))
                console.print(tables[-1].as_rich())
    console.print(*notes, sep="\n", highlight=False, soft_wrap=True)
    if arguments.markdown:
        write_markdown(arguments.markdown, known, tables, notes)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [size.name for size in SIZES]
    usual = ["gpipe", "1f1b", "interleaved1f1b"]
    parser.add_argument("--sizes", nargs="+", choices=names, default=names)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULE_NAMES, default=usual)
    parser.add_argument("--rounds", type=int, default=30, help="blocks of steps per contender, size and schedule")
    parser.add_argument(
        "--bubbles", action="store_true", help="compute the idle time of all schedules, measure no steps"
    )
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    return parser.parse_args()


def _facts(num_rounds: int) -> list[str]:
    machine, versions, _ = facts([*CONTENDERS, "transformers"], num_rounds, NUM_THREADS)
    rounds = f"median of {num_rounds} rounds (10th to 90th percentile) of blocks of {LOGGING_STEPS} steps or more"
    return [machine, versions, rounds, RANKS_FACT.format(NUM_RANKS)]


# --- steps


def _measure(size: Size, schedule: str, num_rounds: int) -> dict[str, list[Cost]]:
    with tempfile.TemporaryDirectory() as directory:
        _run_ranks([directory, size.name, schedule, str(num_rounds), *CONTENDERS])
        results = json.loads(Path(directory, RESULT_FILE).read_text())
    return {name: [Cost(**cost) for cost in rounds] for name, rounds in results.items()}


def _run_ranks(arguments: Sequence[str]) -> None:
    # Poll the ranks rarely, since they occupy both cores.
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}", "--monitor-interval=2"]
    script = str(Path(__file__).with_name("pipeline_rank.py"))
    command = [sys.executable, *torchrun, script, *arguments]
    environment = {**os.environ, **settings(NUM_THREADS)}
    result = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if result.returncode != 0:
        raise RuntimeError(f"A rank failed:\n{result.stdout}")


def _title(size: Size, schedule: str) -> str:
    num_parameters = sum(one.numel() for one in make_model(size).parameters())
    shape = f"{size.batch_size} x {size.sequence_length} in {NUM_MICROBATCHES} micro-batches"
    return f"One step of {size.name} with {schedule}: {num_parameters:,} parameters, batch {shape}"


def _step_table(title: str, costs: dict[str, list[Cost]]) -> ResultTable:
    columns = ["", "wall ms", "CPU ms", "throughput / bare", "throughput / bare with norm", "CPU / bare with norm"]
    rows = []
    for name, rounds in costs.items():
        bare, with_norm = costs[BARE], costs[BARE_WITH_NORM]
        compared = [
            "" if name == BARE else _median_of_ratios([one.wall for one in bare], [one.wall for one in rounds]),
            "" if name != OURS else _median_of_ratios([one.wall for one in with_norm], [one.wall for one in rounds]),
            "" if name != OURS else _median_of_ratios([one.cpu for one in rounds], [one.cpu for one in with_norm]),
        ]
        wall, cpu = spread([one.wall * MS for one in rounds], 1), spread([one.cpu * MS for one in rounds], 1)
        rows.append([name, wall, cpu, *compared])
    return ResultTable(title, columns, rows, OURS)


def _median_of_ratios(dividends: Sequence[float], divisors: Sequence[float]) -> str:
    # Compare within a round: a disturbance usually lasts longer than a turn.
    ratios = [dividend / divisor for dividend, divisor in zip(dividends, divisors, strict=True)]
    low, high = _bootstrap_interval(ratios)
    return f"{statistics.median(ratios):.2f} ({low:.2f}-{high:.2f})"


def _bootstrap_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95% bootstrap interval of the median."""
    draw = random.Random(0)
    medians = [statistics.median(draw.choices(values, k=len(values))) for _ in range(_NUM_RESAMPLES)]
    low, *_, high = statistics.quantiles(medians, n=40)
    return low, high


_STEP_NOTES = [
    "CPU: time of all threads of both ranks. Ratios: median of the ratios within each round (95% bootstrap interval).",
    "All loops run the same stages with the same schedule on the same batches. The benchmark compares the parameters "
    "after the first step to check this. Bare: each rank makes its batches and runs torch's schedule and AdamW, "
    "nothing else.",
    "In Forgather, rank 0 reads for all ranks, and the ranks agree on every batch. Forgather also measures the "
    f"gradient norm at every step, and follows a learning-rate schedule. Every {LOGGING_STEPS} steps it assembles a "
    "log record with the norms, although no callback is attached.",
    MALLOC_NOTE,
]


# --- bubbles


def _bubble_table() -> ResultTable:
    columns = ["", *(f"{ranks} ranks, {number} micro-batches" for ranks, number in _BUBBLE_LAYOUTS)]
    rows = [[traits.name, *(_bubble(one, *layout) for layout in _BUBBLE_LAYOUTS)] for one, traits in SCHEDULES.items()]
    return ResultTable("Idle share of a step", columns, rows, "")


def _bubble(schedule_class: type, num_ranks: int, num_micro_batches: int) -> str:
    try:
        check_layout(schedule_class, num_ranks, SCHEDULES[schedule_class].default_stages_per_rank, num_micro_batches)
    except ValueError:
        return "-"
    return f"{bubble_share(schedule_class, num_ranks, num_micro_batches):.1%}"


_BUBBLE_NOTES = [
    "Computed from the order of work in torch's schedules. Assumptions: all stages are equal, a backward pass takes "
    "twice as long as a forward pass, and communication takes no time. Multi-stage schedules have two stages per "
    "rank.",
    "-: the schedule cannot run in this layout (dualpipev needs at least one micro-batch per stage).",
]


if __name__ == "__main__":
    main()
