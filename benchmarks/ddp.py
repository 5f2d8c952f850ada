"""Data-parallel benchmark: overhead of a step on two ranks over a bare DDP loop, for Forgather and other trainers.

    python benchmarks/ddp.py [--sizes nano 10M] [--rounds 40] [--only NAME...] [--markdown FILE]

The script starts the ranks on this machine, with gloo over localhost. On each rank all loops stay alive, each in a
separate thread, and exactly one thread runs. They take turns in blocks of steps, in the same random order on both
ranks. The ranks wait for each other between turns. Rank 0 measures. Contenders with a missing package are skipped. The
docstring of step.py describes how to include Lightning.
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ddp_contenders import BARE, CONTENDERS, NUM_RANKS, OURS, OURS_SHARDED
from ddp_rank import RESULT_FILE
from result_table import ResultTable, write_markdown
from rich.console import Console
from step import MALLOC_NOTE, MS, Cost, facts, interval_of_median, settings, spread, title_of
from step_contenders import SIZES, Size, installed

_NUM_THREADS = 1
_POLL_SECONDS = 0.5


def main() -> None:
    arguments = _parse_arguments()
    kept = CONTENDERS if arguments.only is None else (BARE, OURS, OURS_SHARDED, *arguments.only)
    names = [name for name in installed(CONTENDERS) if name in kept]
    console = Console(width=None if sys.stdout.isatty() else 140)
    known = [*facts(names, arguments.rounds, _NUM_THREADS), f"{NUM_RANKS} ranks on this machine, gloo over localhost"]
    console.print(*known, sep="\n", highlight=False, soft_wrap=True)
    tables = []
    for size in (size for size in SIZES if size.name in arguments.sizes):
        costs = _measure_size(size, names, arguments.rounds)
        tables.append(_table(title_of(size, NUM_RANKS), costs))
        console.print(tables[-1].as_rich())
    console.print(*_NOTES, sep="\n", highlight=False, soft_wrap=True)
    if arguments.markdown:
        write_markdown(arguments.markdown, known, tables, _NOTES)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", choices=[size.name for size in SIZES], default=["nano", "10M"])
    parser.add_argument("--rounds", type=int, default=40, help="blocks of steps per contender and size")
    parser.add_argument("--only", nargs="+", help="contenders besides the bare loop and Forgather")
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    return parser.parse_args()


def _measure_size(size: Size, names: Sequence[str], num_rounds: int) -> dict[str, list[Cost]]:
    with tempfile.TemporaryDirectory() as directory:
        _run_ranks(directory, [directory, size.name, str(num_rounds), *names])
        results = json.loads(Path(directory, RESULT_FILE).read_text())
    return {name: [Cost(**cost) for cost in rounds] for name, rounds in results.items()}


def _run_ranks(directory: str, arguments: Sequence[str]) -> None:
    command = [sys.executable, str(Path(__file__).with_name("ddp_rank.py")), *arguments]
    environments = _environments()
    logs = [Path(directory, f"rank{rank}.log") for rank in range(NUM_RANKS)]
    with contextlib.ExitStack() as stack:
        processes = []
        for log, environment in zip(logs, environments, strict=True):
            file = stack.enter_context(log.open("w"))
            process = stack.enter_context(subprocess.Popen(command, stdout=file, stderr=file, env=environment))
            # If one rank dies, the other would wait for it until the timeout.
            stack.callback(process.kill)
            processes.append(process)
        while any(process.poll() is None for process in processes):
            if any(process.returncode for process in processes):
                break
            time.sleep(_POLL_SECONDS)
    if any(process.returncode for process in processes):
        texts = (f"--- {log.name}:\n{log.read_text()}" for log in logs)
        raise RuntimeError("\n".join(["A rank failed.", *texts]))


def _environments() -> list[dict[str, str]]:
    """Return the environment of each rank: variables that torchrun sets, and `settings` of all benchmarks."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(NUM_RANKS),
        "LOCAL_WORLD_SIZE": str(NUM_RANKS),
        "GROUP_RANK": "0",
        # Lightning detects by this variable that the ranks are already started.
        "TORCHELASTIC_RUN_ID": "benchmark",
    }
    every_rank = {**os.environ, **settings(_NUM_THREADS), **common}
    return [{**every_rank, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(NUM_RANKS)]


def _table(title: str, costs: dict[str, list[Cost]]) -> ResultTable:
    columns = ["", "wall ms", "CPU ms", "wall / bare", "95% interval"]
    rows = []
    for name, rounds in costs.items():
        # Compare within a round: a disturbance usually lasts longer than a turn.
        ratios = [one.wall / bare.wall for one, bare in zip(rounds, costs[BARE], strict=True)]
        low, high = interval_of_median(ratios)
        wall, cpu = spread([one.wall * MS for one in rounds]), spread([one.cpu * MS for one in rounds])
        compared = ["", ""] if name == BARE else [f"{statistics.median(ratios):.3f}", f"{low:.3f} to {high:.3f}"]
        rows.append([name, wall, cpu, *compared])
    return ResultTable(title, columns, rows, OURS)


_NOTES = [
    "CPU: time of all threads of rank 0. wall / bare: median of the ratios within each round.",
    "Every loop logs the loss in its usual way, with its default callbacks and progress bars. No loop saves or clips "
    "gradients. dispatched: rank 0 makes the batches of both ranks.",
    "Forgather also measures the gradient norm at every step. By default it sets gradient_as_bucket_view, so that "
    "gradients are views of DDP's buckets. The bare loop with Forgather settings does both. All other loops leave DDP "
    "at its defaults.",
    "The benchmark checks that each rank gets its own batches, and that all ranks end with the same parameters.",
    MALLOC_NOTE,
]


if __name__ == "__main__":
    main()
