"""Ranks on this machine for benchmarks: start the processes, collect their results, compare contenders with a bare loop.

Ranks talk over gloo on localhost. Each rank has the environment variables that torchrun sets, and the `settings` of all
benchmarks.
"""

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from result_table import ResultTable
from step import MS, Cost, interval_of_median, settings, spread

NUM_THREADS = 1
RANKS_FACT = "{} ranks on this machine, gloo over localhost"
RESULT_FILE = "costs.json"
_POLL_SECONDS = 0.5


def measure_on_ranks(script: str, num_ranks: int, arguments: Sequence[str]) -> dict[str, list[Cost]]:
    """Run a script of this folder on ranks, and return the costs that rank 0 wrote: a list per contender."""
    with tempfile.TemporaryDirectory() as directory:
        run_ranks(script, num_ranks, directory, arguments)
        results = json.loads(Path(directory, RESULT_FILE).read_text())
    return {name: [Cost(**cost) for cost in rounds] for name, rounds in results.items()}


def run_ranks(script: str, num_ranks: int, directory: str, arguments: Sequence[str]) -> None:
    """Run a script of this folder on ranks, with the directory for its results as the first argument."""
    command = [sys.executable, str(Path(__file__).with_name(script)), directory, *arguments]
    environments = _environments(num_ranks)
    logs = [Path(directory, f"rank{rank}.log") for rank in range(num_ranks)]
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


def _environments(num_ranks: int) -> list[dict[str, str]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_RANK": "0",
        # Lightning detects by this variable that the ranks are already started.
        "TORCHELASTIC_RUN_ID": "benchmark",
    }
    every_rank = {**os.environ, **settings(NUM_THREADS), **common}
    return [{**every_rank, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


def ratio_table(title: str, costs: Mapping[str, Sequence[Cost]], bare: str, highlighted: str) -> ResultTable:
    """Return a table of step times, with the ratio of each contender to the contender `bare`."""
    columns = ["", "wall ms", "CPU ms", "wall / bare", "95% interval", "CPU / bare"]
    rows = []
    for name, rounds in costs.items():
        # Compare within a round: a disturbance usually lasts longer than a turn.
        pairs = list(zip(rounds, costs[bare], strict=True))
        ratios = [one.wall / base.wall for one, base in pairs]
        low, high = interval_of_median(ratios)
        of_cpu = statistics.median(one.cpu / base.cpu for one, base in pairs)
        wall, cpu = spread([one.wall * MS for one in rounds]), spread([one.cpu * MS for one in rounds])
        compared = [f"{statistics.median(ratios):.3f}", f"{low:.3f} to {high:.3f}", f"{of_cpu:.3f}"]
        rows.append([name, wall, cpu, *([""] * 3 if name == bare else compared)])
    return ResultTable(title, columns, rows, highlighted)
