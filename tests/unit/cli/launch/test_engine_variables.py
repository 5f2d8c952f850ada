"""Launch options from the environment: PET_* of Kubernetes are defaults, `--nnodes slurm` reads the job step."""

import os

import pytest
import torch

from forgather.cli.errors import UsageError
from forgather.cli.launch.options import (
    LAUNCHER_VARIABLE,
    LaunchOptions,
    is_worker,
    join_slurm,
    num_processes_of_job,
    take_launch_options,
)
from tests.unit.test_slurm import step

TRAIN_JOB = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}
"""Variables of a pod of a TrainJob."""
PYTORCH_JOB = {**TRAIN_JOB, "RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
"""A PyTorchJob also sets RANK, to the number of the pod."""
ONE_TASK_PER_NODE = {
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_GTIDS": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
MANAGED = ("PET_", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", LAUNCHER_VARIABLE)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables of engines, and restore them after the test, also those that the test has set."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(MANAGED)}
    for name in [*os.environ]:
        if name not in kept:
            monkeypatch.delenv(name)
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        LAUNCHER_VARIABLE,
    ):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def use(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def options_of(*words: str) -> LaunchOptions:
    return take_launch_options(words)[0]


@pytest.mark.parametrize("variables", [TRAIN_JOB, PYTORCH_JOB], ids=["TrainJob", "PyTorchJob"])
def test_pod_launches_the_processes_of_its_node(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    use(monkeypatch, variables)
    options = options_of("my.yaml")
    assert not is_worker() and options.needs_launcher and num_processes_of_job(options) == 8
    assert (options.num_nodes, options.num_processes, options.node_rank) == (2, 4, 1)
    assert options.rendezvous_endpoint == "job-node-0-0.job:29400"


def test_command_line_overrides_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, TRAIN_JOB)
    options = options_of("--nproc", "1", "--rdzv-endpoint", "other:1")
    assert (options.num_processes, options.rendezvous_endpoint, options.num_nodes) == (1, "other:1", 2)
    assert options_of("-d", "0,2").num_processes == 2


@pytest.mark.parametrize("words", [(), ("--nnodes", "1")])
def test_single_node_needs_no_endpoint(monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    use(monkeypatch, TRAIN_JOB if words else {**TRAIN_JOB, "PET_NNODES": "1", "PET_NODE_RANK": "0"})
    options = options_of(*words)
    assert (options.num_nodes, options.num_processes, options.rendezvous_endpoint) == (1, 4, None)


def test_elastic_job_takes_range_endpoint_and_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    elastic = {"PET_NNODES": "1:3", "PET_RDZV_ENDPOINT": "job-worker-0:23456", "PET_RDZV_BACKEND": "c10d"}
    use(monkeypatch, {**elastic, "PET_MAX_RESTARTS": "5"})
    options = options_of()
    assert (options.min_nodes, options.num_nodes, options.max_restarts) == (1, 3, 5)
    assert options.rendezvous_endpoint == "job-worker-0:23456"


def test_workers_ignore_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, {**PYTORCH_JOB, "TORCHELASTIC_RUN_ID": "none"})
    assert is_worker() and options_of() == LaunchOptions()


def test_pod_with_rank_only_is_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "PET_NPROC_PER_NODE": "1"})
    assert is_worker() and num_processes_of_job(options_of()) == 2


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PET_NNODES": "two"}, r"--nnodes two: expected .* \(environment variables: PET_NNODES=two\)"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "0"}, "--nnodes 2 also needs --rdzv-endpoint"),
        (
            {**TRAIN_JOB, "PET_RDZV_BACKEND": "etcd-v2"},
            "PET_RDZV_BACKEND is etcd-v2, but Forgather's rendezvous is c10d",
        ),
    ],
)
def test_unusable_variables_are_named(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str) -> None:
    use(monkeypatch, variables)
    with pytest.raises(UsageError, match=message):
        options_of()


def test_number_of_processes_may_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    num_cores = len(os.sched_getaffinity(0))
    use(monkeypatch, {"PET_NPROC_PER_NODE": "cpu"})
    assert options_of().num_processes == num_cores
    num_devices = torch.accelerator.device_count()
    assert options_of("--nproc", "auto").num_processes == (num_devices or num_cores)
    if num_devices == 0:
        with pytest.raises(UsageError, match="--nproc gpu: this machine has no accelerator"):
            options_of("--nproc", "gpu")


def test_launcher_on_each_node_takes_its_place_from_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, step(**ONE_TASK_PER_NODE))
    options = options_of("--nnodes", "slurm", "--nproc", "8")
    assert (options.num_nodes, options.node_rank, options.num_processes) == (2, 1, 8)
    assert options.rendezvous_endpoint == "node01:16234"
    join_slurm(options)
    assert not is_worker() and "RANK" not in os.environ
    assert options_of("--nnodes", "slurm", "--rdzv-endpoint", "fast:7").rendezvous_endpoint == "fast:7"


def test_task_without_launch_options_is_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, step())
    join_slurm(options_of())
    assert is_worker() and os.environ["RANK"] == "1" and num_processes_of_job(options_of()) == 3


def test_task_with_one_node_given_stays_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from forgather.ml.distributed import get_world_size

    use(monkeypatch, step())
    join_slurm(options_of("--nnodes", "1"))
    assert not is_worker() and get_world_size() == 1


@pytest.mark.parametrize(
    ("changes", "words", "message"),
    [
        ({"SLURM_STEP_ID": None}, (), "This process is not in a job step"),
        ({}, (), "the step has 3 tasks on 2 node"),
        (ONE_TASK_PER_NODE, ("--node-rank", "1"), "remove --node-rank"),
        ({**ONE_TASK_PER_NODE, "SLURM_PROCID": "2"}, (), "task 2 does not exist among 2 task"),
    ],
)
def test_wrong_use_of_slurm_is_explained(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str | None], words: tuple[str, ...], message: str
) -> None:
    use(monkeypatch, step(**changes))
    with pytest.raises(UsageError, match=message):
        options_of("--nnodes", "slurm", *words)
