"""Ranks that fail or die under a launcher: the job ends at once with the cause on screen, or goes on after a restart."""

import threading
import time
from pathlib import Path

import pytest

from tests.support.ddp_job import NUM_STEPS
from tests.support.launch import CompletedAgent, run_torchrun

JOB = ["-m", "tests.support.ddp_job"]
FAILURES = ("step", "loss", "evaluation", "save")
GRACE_SECONDS = 30.0


class Ended:
    """A job that has ended, and how long it took."""

    def __init__(self, directory: Path, where: str, num_nodes: int = 1, max_restarts: int = 0) -> None:
        self._arguments = [*JOB, str(directory), where]
        directory.mkdir()
        self._num_nodes = num_nodes
        self._max_restarts = max_restarts
        self.seconds = 0.0
        self.agents: list[CompletedAgent] = []
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        started = time.monotonic()
        self.agents = run_torchrun(
            self._arguments, 2 // self._num_nodes, nnodes=self._num_nodes, max_restarts=self._max_restarts
        )
        self.seconds = time.monotonic() - started


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """All at once: they wait more than they compute."""
    directory = tmp_path_factory.mktemp("jobs")
    jobs = {where: Ended(directory / where, where) for where in (*FAILURES, "nowhere")}
    jobs["kill"] = Ended(directory / "kill", "kill", num_nodes=2, max_restarts=1)
    for job in jobs.values():
        job.thread.join()
    return jobs


def outcome(jobs: dict[str, Ended], name: str) -> CompletedAgent:
    assert jobs[name].agents, f"{name} did not end"
    return jobs[name].agents[0]


@pytest.mark.parametrize("where", FAILURES)
def test_failure_of_one_rank_ends_the_job_with_its_cause(where: str, jobs: dict[str, Ended]) -> None:
    agent = outcome(jobs, where)
    assert agent.returncode != 0
    assert "ValueError: this is the root cause" in agent.output
    assert "Traceback" in agent.output
    cause = agent.output.split("Root Cause")[1]
    # Where the ranks agree on an error, any of them may report it, and names the one that failed.
    assert "rank      : 1" in cause or "rank 1 failed during" in agent.output
    assert jobs[where].seconds < jobs["nowhere"].seconds + GRACE_SECONDS


def test_job_of_two_nodes_is_finished_by_the_launchers_after_a_rank_was_killed(jobs: dict[str, Ended]) -> None:
    straight, restarted = outcome(jobs, "nowhere"), jobs["kill"].agents
    assert [agent.returncode for agent in (straight, *restarted)] == [0, 0, 0], restarted[0].output
    for rank, agent in enumerate(restarted):
        (line,) = (
            line for line in straight.output.splitlines() if f"rank {rank} ended at step {NUM_STEPS} with" in line
        )
        assert line in agent.output
