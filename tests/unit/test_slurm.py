"""Variables of Slurm: tasks of a step become ranks; shells, batch scripts and single tasks do not."""

import pytest

from forgather._slurm import adopt_slurm_task, expand_hosts, is_in_step, read_slurm_task

STEP = {
    "SLURM_JOB_ID": "1234",
    "SLURM_JOB_NODELIST": "node[01-03,7],b2",
    "SLURM_NTASKS": "3",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_GTIDS": "0,1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
}
"""Variables of task 1 of 3, as srun sets them on two of the five nodes of a job."""
ONLY_NAMED = (
    *("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_NTASKS", "SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID"),
    "SLURM_STEP_ID",
)


def step(**changes: str | None) -> dict[str, str]:
    """Return the variables of the task with changes; None removes a variable."""
    return {name: value for name, value in {**STEP, **changes}.items() if value is not None}


def test_task_of_srun_becomes_a_rank() -> None:
    environment = step()
    assert adopt_slurm_task(environment)
    assert {name: value for name, value in environment.items() if not name.startswith("SLURM")} == {
        "RANK": "1",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "node01",
        "MASTER_PORT": "16234",
    }


def test_address_that_the_user_sets_stays() -> None:
    environment = step(MASTER_ADDR="fast-network", MASTER_PORT="5", WORLD_SIZE="3")
    assert adopt_slurm_task(environment)
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("fast-network", "5")


def test_variables_of_older_versions_are_enough() -> None:
    environment = {name: STEP[name] for name in ONLY_NAMED}
    environment |= {"SLURM_NTASKS": "10", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NODEID": "3", "SLURM_PROCID": "7"}
    task = read_slurm_task(environment)
    assert (task.rank, task.num_tasks, task.local_rank, task.num_local_tasks) == (7, 10, 1, 2)
    assert (task.node_rank, task.num_nodes, task.first_host) == (3, 5, "node01")


@pytest.mark.parametrize(
    "environment",
    [
        {},
        step(RANK="0"),
        step(FORGATHER_LAUNCHER="forgather"),
        step(SLURM_STEP_ID=None),
        step(SLURM_STEP_ID=None, SLURM_PROCID=None),
        step(SLURM_STEP_ID="4294967290"),
        step(SLURM_STEP_ID="4294967291"),
        step(SLURM_PTY_PORT="40000"),
        step(SLURM_STEP_NUM_TASKS="1"),
        step(SLURM_STEP_NUM_TASKS=None, SLURM_NTASKS="1"),
    ],
    ids=[
        "no Slurm",
        "rank is set",
        "launcher",
        "batch script",
        "shell of salloc",
        "interactive step",
        "batch step",
        "shell of srun --pty",
        "single task of a larger job",
        "single task",
    ],
)
def test_process_that_is_not_one_of_several_tasks_stays_alone(environment: dict[str, str]) -> None:
    before = dict(environment)
    assert not adopt_slurm_task(environment)
    assert environment == before


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"SLURM_PROCID": "3"}, "task 3 does not exist among 3 task(s)"),
        ({"SLURM_LOCALID": "2"}, "task 2 does not exist among 2 of its node"),
        ({"SLURM_NODEID": "2"}, "node 2 does not exist among 2 node(s)"),
        ({"SLURM_NODEID": None}, "SLURM_NODEID is not set"),
        ({"SLURM_PROCID": "one"}, "SLURM_PROCID is 'one', but must be a whole number of 0 or more"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, "3 task(s) on 2 node(s) do not match [2, 2] per node"),
        ({"SLURM_STEP_TASKS_PER_NODE": "two"}, "SLURM_STEP_TASKS_PER_NODE is 'two'"),
        ({"SLURM_STEP_TASKS_PER_NODE": None}, "SLURM_NTASKS_PER_NODE is not set"),
        ({"SLURM_GTIDS": "1,2"}, "start the step with srun --distribution=block"),
        ({"SLURM_HET_SIZE": "2"}, "heterogeneous job"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE is '4', but 3 by the variables of Slurm"),
        ({"SLURM_STEP_NODELIST": ""}, "the list of hosts is empty"),
    ],
)
def test_contradictions_are_named_with_their_variables(changes: dict[str, str | None], problem: str) -> None:
    environment = step(**changes)
    before = dict(environment)
    with pytest.raises(ValueError, match="in the Slurm step is inconsistent") as caught:
        adopt_slurm_task(environment)
    assert problem in str(caught.value) and "SLURM_NTASKS=3" in str(caught.value)
    # A second look, such as from an error handler, must not find half of a rank.
    assert environment == before


def test_single_task_of_srun_is_in_a_step() -> None:
    assert is_in_step(step(SLURM_STEP_NUM_TASKS="1"))
    assert not is_in_step(step(SLURM_STEP_ID=None))


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("alone", "alone"),
        ("node[01-03,7],b2", "node01 node02 node03 node7 b2"),
        ("a,b[8-11]", "a b8 b9 b10 b11"),
        ("rack[1-2]node[09-10]", "rack1node09 rack1node10 rack2node09 rack2node10"),
        ("gpu-[001,003-004]-ib", "gpu-001-ib gpu-003-ib gpu-004-ib"),
        ("", ""),
    ],
)
def test_host_list_expands_in_order(text: str, hosts: str) -> None:
    assert list(expand_hosts(text)) == hosts.split()


@pytest.mark.parametrize("text", ["node[1", "node1]", "node[3-1]", "node[a-b]", "node[]", "a,,b", "n[[1]]", "n[1-2-3]"])
def test_damaged_host_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"host list of Slurm .* is damaged"):
        list(expand_hosts(text))


def test_huge_host_list_ends_with_an_error() -> None:
    with pytest.raises(ValueError, match="more than 100000 hosts"):
        list(expand_hosts("n[1-999999999]"))


def test_steps_of_a_job_have_different_ports() -> None:
    ports = {read_slurm_task(step(SLURM_STEP_ID=str(number))).port for number in range(20)}
    assert len(ports) == 20 and all(15000 <= port < 25000 for port in ports)
