"""Jobs of several ranks without a launcher, forked from one process that has imported what they need.

Started as `python -m tests.support.warm_ranks <directory>`, with a `plan.json` in it. All jobs run at once.
"""

import importlib
import json
import multiprocessing.util
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.launch import CapturedProcess, free_port
from tests.support.rank_nursery import WarmProgram
from tests.support.rank_protocol import rank_variables
from tests.support.warm_up import warm_up


@dataclass
class EndedRank:
    """Finished rank: exit code (negative for a signal), output, and the time of its end."""

    code: int
    output: str
    ended_at: float


def run_warm_ranks(
    module: str, jobs: Mapping[str, tuple[int, Sequence[str]]], timeout: float = 180.0, parallel: int = 16
) -> dict[str, list[EndedRank]]:
    """Run `module.main(arguments)` on the ranks of each job: a number of ranks and the arguments."""
    with tempfile.TemporaryDirectory(prefix="warm_ranks_") as directory:
        plan = {"module": module, "jobs": {name: [number, list(words)] for name, (number, words) in jobs.items()}}
        Path(directory, "plan.json").write_text(json.dumps({**plan, "parallel": parallel}))
        process = CapturedProcess(WarmProgram("tests.support.warm_ranks", (directory,)), {}, None, "warm ranks")
        assert process.wait(timeout) == 0, process.output
        ends = json.loads(Path(directory, "ends.json").read_text())
        return {name: [_read(directory, name, rank, end) for rank, end in enumerate(ends[name])] for name in jobs}


def _read(directory: str, name: str, rank: int, end: tuple[int, float]) -> EndedRank:
    return EndedRank(end[0], Path(directory, f"{name}.{rank}.output").read_text(errors="replace"), end[1])


def fork_rank(module: Any, words: Sequence[str], variables: Mapping[str, str], output_path: str) -> int:
    """Fork a rank, as the leader of its own process group."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()
        output = os.open(output_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(output, sys.stdout.fileno())
        os.dup2(output, sys.stderr.fileno())
        os.environ.update(variables)
        module.main(list(words))
        code = 0
    except BaseException as error:  # noqa: BLE001 - a rank that fails says so and ends with 1
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        multiprocessing.util._exit_function()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(directory: str) -> None:
    plan = json.loads(Path(directory, "plan.json").read_text())
    module = importlib.import_module(plan["module"])
    warm_up()
    waiting, running = list(plan["jobs"].items()), dict[int, tuple[str, int]]()
    ends: dict[str, list[tuple[int, float]]] = {name: [(0, 0.0)] * number for name, (number, _) in waiting}
    while waiting or running:
        while waiting and len(running) + waiting[0][1][0] <= max(plan["parallel"], waiting[0][1][0]):
            name, (number, words) = waiting.pop(0)
            port = free_port()
            for rank in range(number):
                path = os.path.join(directory, f"{name}.{rank}.output")
                running[fork_rank(module, words, rank_variables(rank, number, port), path)] = name, rank
        child, status = os.wait()
        name, rank = running.pop(child)
        ends[name][rank] = os.waitstatus_to_exitcode(status), time.time()
    Path(directory, "ends.json").write_text(json.dumps(ends))


if __name__ == "__main__":
    main(sys.argv[1])
