"""Slurm with real daemons: tasks are ranks, SIGUSR1 saves, and a job that is queued again ends bit-equal.

`make test-slurm` installs Debian's packages and runs these tests.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from forgather._slurm import expand_hosts
from tests.support.rank_nursery import REPOSITORY
from tests.support.slurm_cluster import POLL_SECONDS, Cluster, has_slurm, running_cluster
from tests.unit.cli.program import PLAIN, PLAIN_MODULE

pytestmark = pytest.mark.skipif(
    "SLURM_TESTS" not in os.environ or not has_slurm(), reason="needs slurmctld and slurmd: make test-slurm"
)

PROGRAM = (sys.executable, "-m", "forgather.cli.main", "train", "plain.yaml", "--trainer", "ddp")
SCRIPT = REPOSITORY / "examples" / "slurm.sub"
ON_TWO_NODES = ("--nodes=2", "--ntasks-per-node=1")
NUM_STEPS = 60
JOIN = """
import torch, torch.distributed as dist
from forgather.ml.distributed import DistributedEnvironment, get_local_process_group
env = DistributedEnvironment(no_accelerator=True)
total = torch.tensor([env.rank])
dist.all_reduce(total)
node = dist.get_process_group_ranks(get_local_process_group())
print(f"rank {env.rank} of {env.world_size}: total {int(total)}, local {env.local_rank}, node {node}")
"""
SHOW_SIZE = "from forgather.ml.distributed import get_world_size; print('world size', get_world_size())"


@dataclass(frozen=True)
class Runs:
    """Folder with an uninterrupted run and a run that was interrupted and queued again."""

    folder: Path
    straight: dict[str, str]
    """Description of the uninterrupted job by Slurm."""
    requeued: dict[str, str]
    mark: dict[str, object]
    """Content of the file `preempted` of the interrupted job, before it started again."""

    def log(self, job: dict[str, str]) -> str:
        return (self.folder / f"forgather-{job['JobId']}.log").read_text()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run whose steps take long enough to send a signal in between."""
    folder = tmp_path_factory.mktemp("run")
    configuration = PLAIN.replace("max_steps: 5", f"max_steps: {NUM_STEPS}").replace("save_steps: 2", "save_steps: 25")
    (folder / "plain.yaml").write_text(configuration)
    slow = "    def forward(self, input_ids):\n        time.sleep(0.1)"
    module = PLAIN_MODULE.replace("    def forward(self, input_ids):", slow)
    (folder / "plain.py").write_text(f"import time\n{module}")
    return folder


@pytest.fixture(scope="module")
def runs(cluster: Cluster, folder: Path) -> Runs:
    straight = submit_example(cluster, folder, "straight")
    described = cluster.wait_until_over(straight)
    requeued = submit_example(cluster, folder, "requeued")
    wait_for_step(folder / "requeued", 8)
    assert cluster.run("scancel", "--signal=USR1", requeued).returncode == 0
    mark = wait_for_mark(folder / "requeued" / "preempted")
    return Runs(folder, described, cluster.wait_until_over(requeued), mark)


def program_variables() -> dict[str, str]:
    path = os.pathsep.join((str(REPOSITORY / "src"), str(REPOSITORY)))
    return {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def submit_example(cluster: Cluster, folder: Path, output: str) -> str:
    """Submit examples/slurm.sub as it is, with the program of this environment."""
    env = {**program_variables(), "OUTPUT_DIR": output, "FORGATHER": " ".join(PROGRAM[:3])}
    return cluster.submit(folder, env, str(SCRIPT), "plain.yaml")


def wait_for_step(output: Path, step: int, seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    log = output / "trainer_logs.jsonl"
    while not log.exists() or log.read_text().count("\n") < step:
        assert time.monotonic() < end, list(output.parent.glob("*.log"))
        time.sleep(POLL_SECONDS / 5)


def wait_for_mark(path: Path, seconds: float = 120) -> dict[str, object]:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"no {path}"
        time.sleep(POLL_SECONDS / 5)
    found: dict[str, object] = json.loads(path.read_text())
    return found


def weights_of(output: Path) -> dict[str, bytes]:
    """Return the tensor files of the last checkpoint: model, optimizer and other state of all ranks."""
    checkpoint = output / "checkpoints" / f"checkpoint-{NUM_STEPS}"
    return {str(path.relative_to(checkpoint)): path.read_bytes() for path in checkpoint.rglob("*.safetensors")}


def test_batch_job_trains_on_two_nodes(runs: Runs) -> None:
    assert runs.straight["JobState"] == "COMPLETED" and runs.straight["NumNodes"] == "2"
    text = runs.log(runs.straight)
    assert "2 processes" in text and "4 per device x 1 accumulated x 2 data-parallel = 8 per step" in text
    assert f"step {NUM_STEPS}/{NUM_STEPS}" in text and not (runs.folder / "straight" / "preempted").exists()


def test_user_signal_saves_and_marks_the_run_as_preempted(runs: Runs) -> None:
    step = runs.mark["step"]
    assert runs.mark["signal"] == "SIGUSR1" and isinstance(step, int) and 8 <= step < NUM_STEPS
    assert str(runs.mark["checkpoint"]).endswith(f"checkpoint-{step}")
    assert f"preempted by SIGUSR1 at step {step}" in runs.log(runs.requeued)


def test_job_queued_again_resumes_and_ends_bit_equal(runs: Runs) -> None:
    assert runs.requeued["JobState"] == "COMPLETED" and runs.requeued["Restarts"] == "1"
    text = runs.log(runs.requeued)
    assert f"Resumed from requeued/checkpoints/checkpoint-{runs.mark['step']}\n" in text, text
    assert not (runs.folder / "requeued" / "preempted").exists()
    straight = weights_of(runs.folder / "straight")
    assert straight and straight == weights_of(runs.folder / "requeued")


def test_one_launcher_per_node_trains_the_same_model(cluster: Cluster, runs: Runs) -> None:
    words = ("--nnodes", "slurm", "--nproc", "1", "--args.output_dir", "launched")
    done = cluster.run("srun", *ON_TWO_NODES, *PROGRAM, *words, env=program_variables(), cwd=runs.folder)
    assert done.returncode == 0 and "2 processes" in done.stdout, done.stdout
    assert weights_of(runs.folder / "launched") == weights_of(runs.folder / "straight")


def test_script_in_tasks_of_uneven_nodes_knows_its_ranks(cluster: Cluster) -> None:
    command = (sys.executable, "-c", JOIN)
    done = cluster.run("srun", "--nodes=2", "--ntasks=3", "--overcommit", *command, env=program_variables())
    assert done.returncode == 0, done.stdout
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("rank")) == [
        "rank 0 of 3: total 3, local 0, node [0, 1]",
        "rank 1 of 3: total 3, local 1, node [0, 1]",
        "rank 2 of 3: total 3, local 0, node [2]",
    ]


@pytest.mark.parametrize("command", [("salloc", "--nodes=2", "--ntasks=4"), ("srun", "--ntasks=1")], ids=" ".join)
def test_shell_of_an_allocation_and_single_task_are_no_ranks(cluster: Cluster, command: tuple[str, ...]) -> None:
    done = cluster.run(*command, sys.executable, "-c", SHOW_SIZE, env=program_variables())
    assert "world size 1" in done.stdout, done.stdout


def test_tasks_that_alternate_between_nodes_are_refused(cluster: Cluster) -> None:
    words = ("--nodes=2", "--ntasks=4", "--distribution=cyclic", *PROGRAM)
    done = cluster.run("srun", *words, env=program_variables())
    assert done.returncode == 2 and "start the step with srun --distribution=block" in done.stdout, done.stdout


@pytest.mark.parametrize("text", ["node[01-03,7],b2", "a,b[8-11]", "rack[1-2]node[09-10,100]"])
def test_host_lists_expand_as_slurm_expands_them(cluster: Cluster, text: str) -> None:
    expected = cluster.run("scontrol", "show", "hostnames", text).stdout.split()
    assert list(expand_hosts(text)) == expected
