"""Ranks that fail or die under a launcher: the job ends at once and shows the cause, or resumes after a restart."""

import re
from pathlib import Path

import pytest

from tests.support.ddp_job import NUM_STEPS
from tests.support.launch import run_torchrun
from tests.support.sampling import long_search
from tests.support.warm_torchrun import WarmJob, run_warm_torchrun

JOB = "tests.support.ddp_job"
FAILURES = ("step", "loss", "evaluation", "save")
KINDS = ("ddp", "fsdp2")
GRACE_SECONDS = 30.0


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, WarmJob]:
    """One job for each failure, and one without a failure."""
    directory = tmp_path_factory.mktemp("jobs")
    arguments = {
        f"{kind} {where}": [str(directory / kind / where), where, kind]
        for kind in KINDS
        for where in (*FAILURES, "nowhere")
    }
    for directory_of_job, *_ in arguments.values():
        Path(directory_of_job).mkdir(parents=True)
    return run_warm_torchrun(JOB, arguments, 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", FAILURES)
def test_failure_of_one_rank_ends_the_job_with_its_cause(where: str, kind: str, jobs: dict[str, WarmJob]) -> None:
    job, sound = jobs[f"{kind} {where}"], jobs[f"{kind} nowhere"]
    (agent,) = job.agents
    assert agent.returncode != 0
    assert "ValueError: this is the root cause" in agent.output
    assert "Traceback" in agent.output
    cause = agent.output.split("Root Cause")[1]
    # All ranks raise an exchanged error: any rank may report it, with the number of the failed rank.
    assert "rank      : 1" in cause or "rank 1 failed while" in agent.output
    assert job.seconds < sound.seconds + GRACE_SECONDS


@long_search
def test_job_on_two_nodes_restarts_and_finishes_after_a_kill(jobs: dict[str, WarmJob], tmp_path: Path) -> None:
    (straight,) = jobs["ddp nowhere"].agents
    restarted = run_torchrun(["-m", JOB, str(tmp_path), "kill"], 1, nnodes=2, max_restarts=1)
    assert [agent.returncode for agent in (straight, *restarted)] == [0, 0, 0], restarted[0].output
    for rank, agent in enumerate(restarted):
        # Lines of two ranks may run together, because both print into one file.
        end = re.search(rf"rank {rank} ended at step {NUM_STEPS} with 0x[0-9a-f.]+p[+-]\d+", straight.output)
        assert end is not None and end[0] in agent.output
