"""Slurm environment variables: rank, node and rendezvous address of a process that `srun` started.

Each task of a step with several tasks is one rank; `adopt_slurm_task` exports RANK, WORLD_SIZE and so on. A
batch script, a shell of `salloc` and a shell of `srun --pty` are no ranks, though they inherit similar variables. Imports
no torch.
"""

import os
import re
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass

_SHOWN = (
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_NTASKS",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NUM_NODES",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_STEP_NODELIST",
    "SLURM_JOB_NODELIST",
    "SLURM_GTIDS",
)
# Slurm numbers the steps of batch scripts and interactive shells from here on.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
# Ports outside of the range that Linux gives to outgoing connections.
_FIRST_PORT, _NUM_PORTS = 15000, 10000
_MOST_HOSTS = 100_000


@dataclass(frozen=True)
class SlurmTask:
    """Task of a job step: rank, node and rendezvous address."""

    rank: int
    num_tasks: int
    local_rank: int
    num_local_tasks: int
    node_rank: int
    num_nodes: int
    first_host: str
    port: int
    """Port for the rendezvous, the same in all tasks of the step."""


def adopt_slurm_task(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Export RANK and so on in a task of a step with several tasks, unless RANK is set; returns whether it did.

    Raises ValueError for contradictory variables.
    """
    # The process that starts ranks itself is not one of them.
    if "RANK" in environment or "FORGATHER_LAUNCHER" in environment or not _has_peers(environment):
        return False
    task = read_slurm_task(environment)
    if task.num_local_tasks < task.num_tasks:
        _check_order(task, environment)
    variables = {
        "WORLD_SIZE": str(task.num_tasks),
        "LOCAL_RANK": str(task.local_rank),
        "LOCAL_WORLD_SIZE": str(task.num_local_tasks),
    }
    for name, value in variables.items():
        if environment.get(name, value) != value:
            raise _error(f"{name} is {environment[name]!r}, but {value} by the variables of Slurm", environment)
    environment.update(variables, RANK=str(task.rank))
    environment.setdefault("MASTER_ADDR", task.first_host)
    environment.setdefault("MASTER_PORT", str(task.port))
    return True


def is_in_step(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether `srun` started this process in a job step; a shell for typing does not count."""
    step = environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID", ""))
    is_numbered = step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP
    # `srun --pty bash` starts a shell. Its commands are not tasks that wait for each other.
    return is_numbered and "SLURM_PROCID" in environment and "SLURM_PTY_PORT" not in environment


def read_slurm_task(environment: Mapping[str, str] = os.environ) -> SlurmTask:
    """Return rank and node of this task; raise ValueError if the variables are missing or contradict each other."""
    if environment.get("SLURM_HET_SIZE", "1") != "1":
        raise _error("it is part of a heterogeneous job, and each component numbers its own tasks", environment)
    num_tasks, num_nodes = _num_tasks(environment), _num_nodes(environment)
    node_rank = _number("SLURM_NODEID", environment)
    if node_rank >= num_nodes:
        raise _error(f"node {node_rank} does not exist among {num_nodes} node(s)", environment)
    per_node = _tasks_per_node(num_tasks, num_nodes, environment)
    if len(per_node) != num_nodes or sum(per_node) != num_tasks:
        raise _error(f"{num_tasks} task(s) on {num_nodes} node(s) do not match {per_node} per node", environment)
    task = SlurmTask(
        rank=_number("SLURM_PROCID", environment),
        num_tasks=num_tasks,
        local_rank=_number("SLURM_LOCALID", environment),
        num_local_tasks=per_node[node_rank],
        node_rank=node_rank,
        num_nodes=num_nodes,
        first_host=_first_host(environment),
        port=_port(environment),
    )
    if task.rank >= num_tasks:
        raise _error(f"task {task.rank} does not exist among {num_tasks} task(s)", environment)
    if task.local_rank >= task.num_local_tasks:
        raise _error(f"task {task.local_rank} does not exist among {task.num_local_tasks} of its node", environment)
    return task


def expand_hosts(text: str) -> Iterator[str]:
    """Yield the hosts of a list of Slurm, such as `node[01-03,7],b2`; raise ValueError for a damaged list."""
    count = 0
    for part in _split(text):
        for host in _expand(part, text):
            count += 1
            if count > _MOST_HOSTS:
                raise ValueError(f"The host list {text[:80]!r} has more than {_MOST_HOSTS} hosts.")
            yield host


def _has_peers(environment: Mapping[str, str]) -> bool:
    return is_in_step(environment) and _num_tasks(environment) > 1


def _num_tasks(environment: Mapping[str, str]) -> int:
    # A step may have fewer tasks than the job. With `srun --preserve-env`, SLURM_NTASKS counts those of the job.
    name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    return _number(name, environment, least=1)


def _num_nodes(environment: Mapping[str, str]) -> int:
    for name in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"):
        if name in environment:
            return _number(name, environment, least=1)
    return len(list(_hosts(environment)))


def _tasks_per_node(num_tasks: int, num_nodes: int, environment: Mapping[str, str]) -> list[int]:
    """Return the number of tasks of each node of the step."""
    # With --ntasks, SLURM_NTASKS_PER_NODE is a maximum only, so the counts of the step come first.
    text = environment.get("SLURM_STEP_TASKS_PER_NODE")
    if text is not None:
        return _counts(text, environment)
    if num_nodes == 1:
        return [num_tasks]
    return [_number("SLURM_NTASKS_PER_NODE", environment, least=1)] * num_nodes


def _counts(text: str, environment: Mapping[str, str]) -> list[int]:
    """Return the counts of a text such as `2(x3),1`."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part, flags=re.ASCII)
        if found is None:
            raise _error(f"SLURM_STEP_TASKS_PER_NODE is {text!r}, which is no list such as 2(x3),1", environment)
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _check_order(task: SlurmTask, environment: Mapping[str, str]) -> None:
    """Raise ValueError unless the ranks of a node are consecutive, which groups of a node rely on."""
    on_node = environment.get("SLURM_GTIDS")
    first = task.rank - task.local_rank
    expected = ",".join(str(first + number) for number in range(task.num_local_tasks))
    if on_node is not None and on_node != expected:
        raise _error(
            f"the tasks of its node are {on_node}, but must be consecutive: start the step with srun --distribution=block",
            environment,
        )


def _first_host(environment: Mapping[str, str]) -> str:
    host = next(_hosts(environment), None)
    if host is None:
        raise _error("the list of hosts is empty", environment)
    return host


def _hosts(environment: Mapping[str, str]) -> Iterator[str]:
    # The nodes of a step may be a part of the job's.
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if name in environment:
            return expand_hosts(environment[name])
    raise _error("SLURM_JOB_NODELIST is not set", environment)


def _port(environment: Mapping[str, str]) -> int:
    job = _number("SLURM_JOB_ID", environment)
    # Steps of one job may run at the same time on the same host.
    step = environment.get("SLURM_STEP_ID", "0")
    return _FIRST_PORT + (job + 101 * int(step if step.isdecimal() else 0)) % _NUM_PORTS


def _split(text: str) -> Iterator[str]:
    """Yield the parts of a host list between commas outside of brackets."""
    depth, begin = 0, 0
    for position, letter in enumerate(text):
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if depth not in (0, 1):
            raise _damaged(text)
        if letter == "," and depth == 0:
            yield text[begin:position]
            begin = position + 1
    if depth != 0:
        raise _damaged(text)
    if begin < len(text):
        yield text[begin:]


def _expand(part: str, text: str) -> Iterator[str]:
    """Yield the hosts of a part, which may have several brackets, such as `rack[1-2]node[01-16]`."""
    prefix, bracket, rest = part.partition("[")
    if not bracket:
        if not part:
            raise _damaged(text)
        yield part
        return
    ranges, _, suffix = rest.partition("]")
    for one in ranges.split(","):
        for number in _numbers(one, text):
            if suffix:
                yield from _expand(f"{prefix}{number}{suffix}", text)
            else:
                yield f"{prefix}{number}"


def _numbers(one: str, text: str) -> Iterator[str]:
    """Yield the numbers of `3` or `01-03`, padded with zeros as the first is."""
    found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", one, flags=re.ASCII)
    if found is None or int(found[1]) > int(found[2] or found[1]):
        raise _damaged(text)
    for number in range(int(found[1]), int(found[2] or found[1]) + 1):
        yield f"{number:0{len(found[1])}}"


def _number(name: str, environment: Mapping[str, str], least: int = 0) -> int:
    text = environment.get(name)
    if text is None:
        raise _error(f"{name} is not set", environment)
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        raise _error(f"{name} is {text!r}, but must be a whole number of {least} or more", environment)
    return int(text)


def _damaged(text: str) -> ValueError:
    return ValueError(f"The host list of Slurm {text[:80]!r} is damaged; expected one such as node[01-03,7],b2.")


def _error(problem: str, environment: Mapping[str, str]) -> ValueError:
    found = ", ".join(f"{name}={environment[name]}" for name in _SHOWN if name in environment)
    return ValueError(
        f"The rank of this process in the Slurm step is inconsistent: {problem}. Environment variables: {found}. Start "
        "the step with srun and leave these variables unchanged, or set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, "
        "MASTER_ADDR and MASTER_PORT yourself; RANK=0 WORLD_SIZE=1 trains in this process alone."
    )
