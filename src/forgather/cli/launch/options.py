"""Launch options: number of processes, devices and nodes, and checks against a launcher such as torchrun.

Imports no torch. `take_launch_options` runs before the configuration is parsed.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from forgather.cli.errors import UsageError

ELASTIC_VARIABLE = "FORGATHER_ELASTIC"
"""Environment variable of the workers of an elastic job: the range of --nnodes."""
LAUNCHER_VARIABLE = "FORGATHER_LAUNCHER"
"""Environment variable of workers that `forgather train --nproc` started: the path of the program as it was called."""


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
    node_rank: int | None = None
    rendezvous_endpoint: str | None = None
    max_restarts: int = 0

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


_OPTIONS = ("--nproc", "-d", "--nnodes", "--node-rank", "--node-wait", "--rdzv-endpoint", "--max-restarts")
LAUNCH_OPTION_NAMES = tuple(option.lstrip("-") for option in _OPTIONS if option != "-d")


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
        if option not in _OPTIONS:
            others.append(word)
        elif option in given:
            raise UsageError(f"{option} is set twice; remove one of the two.")
        elif equals:
            given[option] = value
        elif rest and not rest[0].startswith("--"):
            given[option] = rest.pop(0)
        else:
            raise UsageError(f"{option} needs a value.")
    return _checked(given), others


def is_worker() -> bool:
    """Return whether a launcher, Forgather's or torchrun, started this process."""
    # Launchers other than torchrun may set only RANK and WORLD_SIZE.
    return ("RANK" in os.environ and "WORLD_SIZE" in os.environ) or "TORCHELASTIC_RUN_ID" in os.environ


def was_started_by_us() -> bool:
    """Return whether Forgather's launcher started this process."""
    return is_worker() and LAUNCHER_VARIABLE in os.environ


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
            "without that launcher."
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


def _checked(given: dict[str, str]) -> LaunchOptions:
    min_nodes, num_nodes = _node_range(given)
    node_rank = _number(given, "--node-rank", least=0)
    endpoint = given.get("--rdzv-endpoint")
    if min_nodes is not None:
        _check_elastic(given["--nnodes"], endpoint)
    else:
        _check_nodes(num_nodes, node_rank, endpoint)
        if "--node-wait" in given:
            raise UsageError("--node-wait is for a range of nodes: write --nnodes MIN:MAX, or remove --node-wait.")
    return LaunchOptions(
        num_processes=_num_processes(given),
        devices=given.get("-d"),
        num_nodes=num_nodes or 1,
        min_nodes=min_nodes,
        node_wait=LaunchOptions.node_wait
        if "--node-wait" not in given
        else _number(given, "--node-wait", least=0) or 0,
        node_rank=node_rank,
        rendezvous_endpoint=endpoint,
        max_restarts=_number(given, "--max-restarts", least=0) or 0,
    )


def _num_processes(given: dict[str, str]) -> int | None:
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
