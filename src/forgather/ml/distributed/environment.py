"""Where this process stands in the job: its rank, its node, its device, and the process group it joins."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from forgather.ml.distributed.launch_variables import check_place, read_int
from forgather.ml.distributed.rendezvous import fresh_store, restarts_share_a_store
from forgather.ml.distributed.shutdown import leave_at_exit

logger = logging.getLogger(__name__)

_VARIABLES = {
    "rank": "RANK",
    "local_rank": "LOCAL_RANK",
    "world_size": "WORLD_SIZE",
    "local_world_size": "LOCAL_WORLD_SIZE",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
}

_requested_timeout: timedelta | None = None


@runtime_checkable
class DistributedEnvInterface(Protocol):
    """What the rest of the library needs to know about the place of this process in the job."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int
    device: str
    device_type: str


EnvironmentT = TypeVar("EnvironmentT", bound=DistributedEnvInterface)


@dataclass(kw_only=True)
class StaticDistributedEnvironment:
    """An environment that is exactly what it is told to be; it initialises nothing."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master_addr: str = "localhost"
    master_port: int = 29501
    device: str = "cpu"
    device_type: str = "cpu"


def get_rank() -> int:
    """This process's rank in the job, by the environment variable RANK."""
    return read_int("RANK", 0)


def get_local_rank() -> int:
    """This process's rank on its node, by the environment variable LOCAL_RANK."""
    return read_int("LOCAL_RANK", 0)


def get_world_size() -> int:
    """The number of processes of the job, by the environment variable WORLD_SIZE."""
    return read_int("WORLD_SIZE", 1)


def get_local_world_size() -> int:
    """The number of processes on this node, by the environment variable LOCAL_WORLD_SIZE."""
    return read_int("LOCAL_WORLD_SIZE", 1)


def init_from_env(obj: EnvironmentT) -> EnvironmentT:
    """Let environment variables overrule the fields of `obj`, and export the fields that no variable gives.

    Returns `obj`, so that libraries that read the variables and code that reads the object see the same place.
    """
    for field, variable in _VARIABLES.items():
        if variable not in os.environ:
            os.environ[variable] = str(getattr(obj, field))
        elif field == "master_addr":
            obj.master_addr = os.environ[variable]
        else:
            setattr(obj, field, read_int(variable, 0))
    return obj


def from_env(**fields: Any) -> StaticDistributedEnvironment:
    """A static environment by the environment variables, with `fields` where a variable is missing."""
    return init_from_env(StaticDistributedEnvironment(**fields))


def get_requested_timeout() -> timedelta | None:
    """The time limit of collectives that the environment was given, for groups made later; None is torch's default."""
    return _requested_timeout


class DistributedEnvironment:
    """The environment of a job: picks this process's device and joins the process group.

    Environment variables win over the arguments, so it serves under torchrun and alone. A process group that exists
    already is joined as it is.

    Args:
        backend: for `init_process_group`; by default gloo for the CPU plus what torch recommends for the accelerator.
        log_level: level of this package's logger.
        device_map: device by local rank; by default accelerator number `local_rank`.
        always: initialise the process group even for a single process.
        no_accelerator: use the CPU even where an accelerator is present.
        timeout: time limit of collectives, in seconds or as a timedelta.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int
    device: str
    device_type: str

    def __init__(
        self,
        rank: int = 0,
        local_rank: int = 0,
        world_size: int = 1,
        local_world_size: int = 1,
        master_addr: str = "localhost",
        master_port: int = 29501,
        backend: str | None = None,
        log_level: str | int = "INFO",
        device_map: Mapping[int, str | torch.device] | None = None,
        always: bool = True,
        no_accelerator: bool = False,
        timeout: float | timedelta | None = None,
    ) -> None:
        logging.getLogger(__package__).setLevel(log_level)
        self.rank = rank
        self.local_rank = local_rank
        self.world_size = world_size
        self.local_world_size = local_world_size
        self.master_addr = master_addr
        self.master_port = master_port
        self.device = self.device_type = "cpu"
        init_from_env(self)
        check_place(self.rank, self.world_size, self.local_rank, self.local_world_size)
        self._use_device(_pick_device(self.local_rank, device_map, no_accelerator))
        if always or self.world_size > 1:
            self._join_process_group(backend, _as_timedelta(timeout))
        logger.info("%s", self)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(rank={self.rank} of {self.world_size}, local_rank={self.local_rank} of "
            f"{self.local_world_size}, device={self.device}, master={self.master_addr}:{self.master_port})"
        )

    def _use_device(self, device: torch.device) -> None:
        self.device = str(device)
        self.device_type = device.type
        if device.type != "cpu" and device.index is not None:
            # Collectives and allocations that name no index would otherwise all land on accelerator 0.
            torch.accelerator.set_device_index(device.index)

    def _join_process_group(self, backend: str | None, timeout: timedelta | None) -> None:
        global _requested_timeout
        _requested_timeout = timeout
        if not dist.is_initialized():
            self._init_process_group(backend or _default_backend(self.device_type), timeout)
            leave_at_exit()
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def _init_process_group(self, backend: str, timeout: timedelta | None) -> None:
        if self.world_size == 1:
            # A process alone needs no network; a port would only collide with that of another job on the machine.
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        elif restarts_share_a_store():
            limit = timeout or default_pg_timeout
            store, rank, world_size = next(rendezvous("env://", self.rank, self.world_size, timeout=limit))
            store.set_timeout(limit)
            store = fresh_store(store, rank, world_size, limit)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        else:
            dist.init_process_group(
                backend, init_method="env://", rank=self.rank, world_size=self.world_size, timeout=timeout
            )


def _as_timedelta(timeout: float | timedelta | None) -> timedelta | None:
    return timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout


def _default_backend(device_type: str) -> str:
    accelerator_backend = dist.get_default_backend_for_device(device_type)
    return "gloo" if accelerator_backend == "gloo" else f"cpu:gloo,{device_type}:{accelerator_backend}"


def _pick_device(
    local_rank: int, device_map: Mapping[int, str | torch.device] | None, no_accelerator: bool
) -> torch.device:
    if device_map is not None:
        return _mapped_device(local_rank, device_map)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if no_accelerator or accelerator is None:
        return torch.device("cpu")
    num_devices = torch.accelerator.device_count()
    if local_rank >= num_devices:
        raise ValueError(
            f"local rank {local_rank} has no {accelerator.type} device: this node has {num_devices}; start at most "
            "that many processes per node, give a device_map, or set no_accelerator=True"
        )
    return torch.device(accelerator.type, local_rank)


def _mapped_device(local_rank: int, device_map: Mapping[int, str | torch.device]) -> torch.device:
    if local_rank not in device_map:
        raise ValueError(
            f"device_map names devices for local ranks {sorted(device_map)}, but this is local rank {local_rank}; "
            "add it to the map, or leave device_map out to use one accelerator per process"
        )
    return torch.device(device_map[local_rank])
