"""Pipeline ranks that fail under a launcher: the job ends at once and shows the cause."""

import threading
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.launch import CompletedAgent, run_torchrun
from tests.support.sampling import sampled

GRACE_SECONDS = 30.0


class Fault(NamedTuple):
    """Failing rank, point of failure and number of ranks; four ranks are two pipelines of two."""

    where: str
    rank: int
    num_ranks: int


FORWARD, EVALUATION = Fault("forward", 0, 2), Fault("evaluation", 2, 4)
# The other places differ between trainers less; test_ddp_faults.py tries them.
FAULTS = sampled([FORWARD, EVALUATION, Fault("loss", 1, 2), Fault("save", 1, 2)], [FORWARD])


class Ended:
    """Finished job, with the seconds from its failure to its end."""

    def __init__(self, fault: Fault, directory: Path) -> None:
        self._fault = fault
        self._directory = directory
        self.agents: list[CompletedAgent] = []
        self.seconds = float("inf")
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        where, rank, num_ranks = self._fault
        job = ["-m", "tests.support.pipeline_fault_job", str(self._directory), where, str(rank)]
        self.agents = run_torchrun(job, num_ranks)
        ended, marker = time.time(), self._directory / "failed"
        if marker.exists():
            self.seconds = ended - marker.stat().st_mtime


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[Fault, Ended]:
    """All jobs, run at the same time because they mostly wait."""
    jobs = {fault: Ended(fault, tmp_path_factory.mktemp(fault.where)) for fault in FAULTS}
    for job in jobs.values():
        job.thread.join()
    return jobs


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.where)
def test_failure_of_one_rank_ends_the_job_with_its_cause(fault: Fault, jobs: dict[Fault, Ended]) -> None:
    job = jobs[fault]
    assert job.agents, f"{fault} did not end"
    (agent,) = job.agents
    assert agent.returncode != 0
    assert "the job should have failed" not in agent.output
    assert "Traceback" in agent.output and "ValueError: this is the root cause" in agent.output, agent.output
    # All ranks raise an exchanged error: any rank may report it, with the number of the failed rank.
    cause = agent.output.split("Root Cause")[1]
    assert f"rank      : {fault.rank}" in cause or f"rank {fault.rank} failed while" in agent.output
    assert f"[rank{fault.rank}]: ValueError: this is the root cause" in agent.output
    assert job.seconds < GRACE_SECONDS
