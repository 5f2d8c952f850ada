"""Launch options: number of processes, devices and nodes, and checks against a launcher such as torchrun.

Variables of Kubernetes (PET_*) and Slurm give values of options. Imports no torch. `take_launch_options` runs before the
configuration is parsed.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from forgather._slurm import adopt_slurm_task, is_in_step
from forgather.cli.errors import UsageError
from forgather.cli.launch.engine_variables import (
    ALL_PROCESSES,
    count_processes,
    is_pet_node,
    pet_options,
    pet_variables,
    slurm_options,
)

ELASTIC_VARIABLE = "FORGATHER_ELASTIC"
"""Environment variable of the workers of an elastic job: the range of --nnodes."""
LAUNCHER_VARIABLE = "FORGATHER_LAUNCHER"
"""Environment variable of workers that `forgather train --nproc` started: the path of the program as it was called."""

_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Requested processes, devices and nodes."""

    num_processes: int | None = None
    """Processes per node; None if not specified."""
    devices: str | None = None
    num_nodes: int = 1
    """Number of nodes; the maximum of an elastic job."""
    min_nodes: int | None = None
    """Minimum number of nodes of an elastic job (--nnodes MIN:MAX); None: the number is fixed."""
    node_wait: int = 15
    """Seconds that an elastic job waits for more nodes once the minimum has joined."""
    node_timeout: int = 900
    """Seconds that an elastic job waits for nodes while it has fewer than the minimum."""
    node_rank: int | None = None
    rendezvous_endpoint: str | None = None
    max_restarts: int = 0
    names_nodes: bool = False
    """Whether --nnodes was given: this process then starts ranks, and is no rank itself."""

    @property
    def num_processes_per_node(self) -> int:
        return self.num_processes or 1

    @property
    def world_size(self) -> int:
        return self.num_processes_per_node * self.num_nodes

    @property
    def needs_launcher(self) -> bool:
        # Restarts need a parent process, even for a single worker.
        return self.world_size > 1 or self.max_restarts > 0

    @property
    def is_elastic(self) -> bool:
        return self.min_nodes is not None


LAUNCH_OPTIONS = {
    "--nproc": "processes on this node, or gpu, cpu or auto: one for each",
    "-d": "one process on each of these devices",
    "--nnodes": "number of nodes, MIN:MAX for an elastic job, or slurm",
    "--node-rank": "number of this node, from 0",
    "--node-wait": "seconds to wait for more nodes of an elastic job",
    "--node-timeout": "seconds to wait while an elastic job has fewer than MIN nodes",
    "--rdzv-endpoint": "HOST:PORT, an address of node 0",
    "--max-restarts": "restarts of all processes after a failure",
}
"""Options with their help texts."""
_ELASTIC_OPTIONS = ("--node-wait", "--node-timeout")
LAUNCH_OPTION_NAMES = tuple(option.lstrip("-") for option in LAUNCH_OPTIONS if option != "-d")


def take_launch_options(words: Sequence[str]) -> tuple[LaunchOptions, list[str]]:
    """Split the command line into launch options and other words."""
    given: dict[str, str] = {}
    others: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        option, equals, value = word.partition("=")
        # Accept --node_rank as well, as torchrun does.
        option = option.replace("_", "-") if option.startswith("--") else option
        if option not in LAUNCH_OPTIONS:
            others.append(word)
        elif option in given:
            raise UsageError(f"{option} is set twice; remove one of the two.")
        elif equals:
            given[option] = value
        elif rest and not rest[0].startswith("--"):
            given[option] = rest.pop(0)
        else:
            raise UsageError(f"{option} needs a value.")
    return _with_engine(given), others


def is_worker() -> bool:
    """Return whether a launcher, such as Forgather's, torchrun or srun, started this process as a rank."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return True
    # Launchers other than torchrun may set only RANK and WORLD_SIZE. In a pod of a PyTorchJob, RANK is the number of the
    # pod, whose processes a launcher in it starts.
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and not is_pet_node()


def join_slurm(options: LaunchOptions) -> None:
    """Become a rank if this process is one of several tasks of srun, unless --nnodes makes it a launcher."""
    if options.names_nodes:
        if is_in_step() and not is_worker():
            # The variable keeps code that asks for the rank from taking this process for one.
            os.environ[LAUNCHER_VARIABLE] = sys.argv[0]
        return
    try:
        adopt_slurm_task()
    except ValueError as error:
        raise UsageError(str(error)) from None


def was_started_by_us() -> bool:
    """Return whether Forgather's launcher started this process."""
    return is_worker() and LAUNCHER_VARIABLE in os.environ


@contextmanager
def quiet_store() -> Iterator[None]:
    """Import torch in the body so that its stores print no C++ stacks; the launcher reports a lost store itself.

    torch reads the variable when it is imported. Workers do not inherit it.
    """
    is_set = _LOG_LEVEL in os.environ
    os.environ.setdefault(_LOG_LEVEL, "ERROR")
    try:
        yield
    finally:
        if not is_set:
            del os.environ[_LOG_LEVEL]


def num_processes_of_job(options: LaunchOptions) -> int:
    """Return the number of processes of the job, running or requested."""
    return int(os.environ.get("WORLD_SIZE", "1")) if is_worker() else options.world_size


def check_against_launcher(options: LaunchOptions) -> None:
    """Raise UsageError in a worker if the options contradict the launcher that started it."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    # A launcher that does not set LOCAL_WORLD_SIZE is taken for a single-node one.
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if options.num_processes is not None and options.num_processes != per_node:
        asked = f"-d {options.devices}" if options.devices is not None else f"--nproc {options.num_processes}"
        raise UsageError(
            f"{asked} requests {options.num_processes} process(es) per node, but torchrun or another launcher has started "
            f"{per_node} (LOCAL_WORLD_SIZE={per_node}, WORLD_SIZE={world_size}). Remove the option, or start forgather "
            "without that launcher. With srun, add --nnodes slurm if each task is to start processes."
        )
    num_nodes = world_size // max(per_node, 1)
    if options.min_nodes is not None and options.min_nodes <= num_nodes <= options.num_nodes:
        return
    # 1 is also the default, so it is no contradiction.
    if options.num_nodes not in (1, num_nodes):
        raise UsageError(
            f"--nnodes {options.num_nodes}, but a launcher has started {world_size} processes, {per_node} per node. Remove "
            "the option, or start forgather without torchrun or another launcher."
        )


def _with_engine(given: dict[str, str]) -> LaunchOptions:
    """Return the options, with values from Slurm for --nnodes slurm, and defaults from the PET_* variables."""
    if given.get("--nnodes") == "slurm":
        return _checked({**given, **slurm_options(given)})
    # Workers have a launcher, which has read the variables.
    defaults = {} if is_worker() else pet_options(given)
    try:
        return _checked({**defaults, **given})
    except UsageError as error:
        if not defaults:
            raise
        raise UsageError(f"{error} (environment variables: {', '.join(pet_variables())})") from None


def _checked(given: dict[str, str]) -> LaunchOptions:
    min_nodes, num_nodes = _node_range(given)
    node_rank = _number(given, "--node-rank", least=0)
    endpoint = given.get("--rdzv-endpoint")
    if min_nodes is not None:
        _check_elastic(given["--nnodes"], endpoint)
    else:
        _check_nodes(num_nodes, node_rank, endpoint)
        for option in given.keys() & _ELASTIC_OPTIONS:
            raise UsageError(f"{option} is for a range of nodes: write --nnodes MIN:MAX, or remove {option}.")
    node_wait, node_timeout = _number(given, "--node-wait", least=0), _number(given, "--node-timeout", least=1)
    return LaunchOptions(
        num_processes=_num_processes(given),
        devices=given.get("-d"),
        num_nodes=num_nodes or 1,
        min_nodes=min_nodes,
        node_wait=LaunchOptions.node_wait if node_wait is None else node_wait,
        node_timeout=node_timeout or LaunchOptions.node_timeout,
        node_rank=node_rank,
        rendezvous_endpoint=endpoint,
        max_restarts=_number(given, "--max-restarts", least=0) or 0,
        names_nodes="--nnodes" in given,
    )


def _num_processes(given: dict[str, str]) -> int | None:
    if given.get("--nproc") in ALL_PROCESSES:
        with quiet_store():
            given = {**given, "--nproc": str(count_processes(given["--nproc"]))}
    number = _number(given, "--nproc", least=1)
    devices = given.get("-d")
    if devices is None:
        return number
    numbers = devices.split(",")
    if not all(one.isdecimal() for one in numbers) or len(set(numbers)) < len(numbers):
        raise UsageError(
            f"-d {devices}: expected the numbers of different devices, separated by commas, such as -d 0,1."
        )
    if number is not None and number != len(numbers):
        raise UsageError(
            f"--nproc {number} and -d {devices} contradict each other: one process per device makes {len(numbers)}. Remove "
            "--nproc."
        )
    return len(numbers)


def _node_range(given: dict[str, str]) -> tuple[int | None, int | None]:
    """Return minimum and maximum of --nnodes MIN:MAX; the minimum of a single number is None."""
    text = given.get("--nnodes", "")
    if ":" not in text:
        return None, _number(given, "--nnodes", least=1)
    numbers = text.split(":")
    if len(numbers) != 2 or not all(one.isdecimal() for one in numbers) or not 1 <= int(numbers[0]) <= int(numbers[1]):
        raise UsageError(f"--nnodes {text}: expected MIN:MAX, such as 2:4, with MIN of 1 or more and at most MAX.")
    return int(numbers[0]), int(numbers[1])


def _check_elastic(text: str, endpoint: str | None) -> None:
    if endpoint is None:
        raise UsageError(
            f"--nnodes {text} also needs --rdzv-endpoint HOST:PORT, an address that all nodes can reach. Run the same command "
            "on each node. The node on HOST, or the one with --node-rank 0, hosts the rendezvous."
        )
    _check_endpoint(endpoint)


def _check_nodes(num_nodes: int | None, node_rank: int | None, endpoint: str | None) -> None:
    if num_nodes is None or num_nodes == 1:
        # --node-rank 0 is harmless with one node.
        alone = "--node-rank" if node_rank else "--rdzv-endpoint" if endpoint is not None else None
        if alone is not None:
            raise UsageError(f"{alone} is for several nodes: add --nnodes with their number, or remove {alone}.")
        return
    if node_rank is None or endpoint is None:
        missing = " and ".join(
            name for name, value in (("--node-rank", node_rank), ("--rdzv-endpoint", endpoint)) if value is None
        )
        raise UsageError(
            f"--nnodes {num_nodes} also needs {missing}. Run the same command on each node, with --node-rank 0 to "
            f"{num_nodes - 1}, and --rdzv-endpoint HOST:PORT, an address of node 0 that all nodes can reach."
        )
    if node_rank >= num_nodes:
        raise UsageError(f"--node-rank {node_rank}: with --nnodes {num_nodes} the nodes are 0 to {num_nodes - 1}.")
    _check_endpoint(endpoint)


def _check_endpoint(endpoint: str) -> None:
    # IPv6 addresses contain colons, so split at the last one.
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal():
        raise UsageError(f"--rdzv-endpoint {endpoint}: expected HOST:PORT, such as node0:29400.")


def _number(given: dict[str, str], option: str, least: int) -> int | None:
    text = given.get(option)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < least:
        raise UsageError(f"{option} {text}: expected a whole number of {least} or more.")
    return int(text)
