"""Torchrun jobs, forked from one process that has imported what their ranks need: a fresh start takes seconds.

Started as `python -m tests.support.warm_torchrun <directory>`, with a `plan.json` in it. This process forks the agents,
and each agent forks its ranks with torchrun's own start method. Otherwise they equal the jobs of `run_torchrun`.
"""

import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import run

from tests.support.launch import CapturedProcess, CompletedAgent, free_port, rendezvous_options
from tests.support.rank_nursery import WarmProgram
from tests.support.warm_up import warm_up


@dataclass
class WarmJob:
    """Finished job and its duration."""

    agents: list[CompletedAgent]
    seconds: float


def run_warm_torchrun(
    module: str, jobs: Mapping[str, Sequence[str]], nproc_per_node: int, nnodes: int = 1, timeout: float = 120.0
) -> dict[str, WarmJob]:
    """Run a module under torchrun once for each job, with the job's arguments, all jobs at once."""
    with tempfile.TemporaryDirectory(prefix="warm_torchrun_") as directory:
        plan = {"module": module, "nnodes": nnodes, "nproc_per_node": nproc_per_node, "jobs": dict(jobs)}
        Path(directory, "plan.json").write_text(json.dumps(plan))
        process = CapturedProcess(WarmProgram("tests.support.warm_torchrun", (directory,)), {}, None, "warm torchrun")
        assert process.wait(timeout) == 0, process.output
        ends = json.loads(Path(directory, "ends.json").read_text())
        return {name: _read_job(Path(directory), name, ends[name]) for name in jobs}


def _read_job(directory: Path, name: str, ends: list[tuple[int, float]]) -> WarmJob:
    outputs = [(directory / f"{name}.{node}.output").read_text(errors="replace") for node in range(len(ends))]
    agents = [CompletedAgent(node, code, outputs[node]) for node, (code, _) in enumerate(ends)]
    return WarmJob(agents, max(seconds for _, seconds in ends))


def start_agent(options: Sequence[str], output_path: str) -> int:
    """Fork an agent; its output and the output of its ranks go to a file."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        output = os.open(output_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(output, sys.stdout.fileno())
        os.dup2(output, sys.stderr.fileno())
        code = run_agent(options)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_agent(options: Sequence[str]) -> int:
    try:
        run.main(list(options))
    except BaseException as error:  # noqa: BLE001 - an agent that fails says so and ends with 1, as from a shell
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def wait_for(children: Mapping[int, tuple[str, int]], started: float) -> dict[str, list[tuple[int, float]]]:
    """Return exit code and duration of each agent, by job and node."""
    ends: dict[tuple[str, int], tuple[int, float]] = {}
    for _ in children:
        child, status = os.wait()
        ends[children[child]] = (os.waitstatus_to_exitcode(status), time.monotonic() - started)
    return {name: [end for (job, _), end in sorted(ends.items()) if job == name] for name, _ in ends}


def main(directory: str) -> None:
    plan = json.loads(Path(directory, "plan.json").read_text())
    script = importlib.import_module(plan["module"]).__file__
    assert script is not None
    warm_up()
    size = ["--nnodes", str(plan["nnodes"]), "--nproc-per-node", str(plan["nproc_per_node"])]
    started, children = time.monotonic(), {}
    for name, arguments in plan["jobs"].items():
        port = free_port()
        for node in range(plan["nnodes"]):
            options = [*size, *rendezvous_options(node, port, elastic=False), "--start-method", "fork", "--run-path"]
            child = start_agent([*options, script, *arguments], os.path.join(directory, f"{name}.{node}.output"))
            children[child] = (name, node)
    Path(directory, "ends.json").write_text(json.dumps(wait_for(children, started)))


if __name__ == "__main__":
    main(sys.argv[1])
