"""Distributed environment: rank, local rank, device and process group of this process.

Environment variables of the launcher take precedence over arguments, so that a script runs unchanged under torchrun and
on its own. Trainers and the command line create a `DistributedEnvironment`; the `get_*` functions only read variables.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout

from forgather._slurm import adopt_slurm_task
from forgather.ml.distributed import flight_recorder
from forgather.ml.distributed.devices import bound_device, check_devices, pick_device
from forgather.ml.distributed.launch_variables import check_place, read_int
from forgather.ml.distributed.meeting import leaves_on_signal
from forgather.ml.distributed.rendezvous import (
    SETUP_LIMIT,
    job_store,
    store_file,
    wait_for_ranks,
)
from forgather.ml.distributed.shutdown import leave_at_exit
from forgather.ml.distributed.watch import Limits, Place, place_of, register_early, watching

logger = logging.getLogger(__name__)

_VARIABLES = {
    "rank": "RANK",
    "local_rank": "LOCAL_RANK",
    "world_size": "WORLD_SIZE",
    "local_world_size": "LOCAL_WORLD_SIZE",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
}

_SECONDS_AFTER_TIMEOUT = 60.0

# Global, because the control groups of `groups.py` are created later and must have the same timeout.
_requested_timeout: timedelta | None = None


@runtime_checkable
class DistributedEnvInterface(Protocol):
    """Protocol of a distributed environment: the attributes that the rest of the library reads."""

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
    """Environment with fixed fields; it initialises nothing."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master_addr: str = "localhost"
    master_port: int = 29501
    device: str = "cpu"
    device_type: str = "cpu"


def get_rank() -> int:
    """Return the rank of this process in the job, from the environment variable RANK (default 0)."""
    return read_int("RANK", 0)


def get_local_rank() -> int:
    """Return the rank of this process on its node, from the environment variable LOCAL_RANK (default 0)."""
    return read_int("LOCAL_RANK", 0)


def get_world_size() -> int:
    """Return the number of processes in the job, from the environment variable WORLD_SIZE (default 1)."""
    return read_int("WORLD_SIZE", 1)


def get_local_world_size() -> int:
    """Return the number of processes on this node, from the environment variable LOCAL_WORLD_SIZE (default 1)."""
    return read_int("LOCAL_WORLD_SIZE", 1)


def init_from_env(obj: EnvironmentT) -> EnvironmentT:
    """Overwrite the fields of `obj` with environment variables, and export fields that have no variable.

    Libraries that read the variables and code that reads the object then see the same values. Returns `obj`.
    """
    adopt_slurm_task()
    for field, variable in _VARIABLES.items():
        if variable not in os.environ:
            os.environ[variable] = str(getattr(obj, field))
        elif field == "master_addr":
            obj.master_addr = os.environ[variable]
        else:
            setattr(obj, field, read_int(variable, 0))
    return obj


def from_env(**fields: Any) -> StaticDistributedEnvironment:
    """Return a static environment from the environment variables, with `fields` as defaults for missing variables."""
    return init_from_env(StaticDistributedEnvironment(**fields))


def get_requested_timeout() -> timedelta | None:
    """Return the timeout of new groups: from the environment object, or else from WORLD.

    None means torch's default, see `default_timeout`.
    """
    return _requested_timeout or _timeout_of_world()


def default_timeout(backend: str) -> timedelta:
    """Return the default timeout of a backend, also of one such as "cpu:gloo,cuda:nccl"."""
    # Torch itself applies the shorter timeout of NCCL only to groups without gloo.
    return (default_pg_nccl_timeout if "nccl" in backend else None) or default_pg_timeout


def _timeout_of_world() -> timedelta | None:
    """Return the timeout that WORLD was created with; None if it is a default of torch."""
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if world is None:
        return None
    # Not every backend has options.
    options = (getattr(world._get_backend(device), "options", None) for device in world._device_types)
    timeout: timedelta | None = next((one._timeout for one in options if one is not None), None)
    return None if timeout in (default_pg_timeout, default_pg_nccl_timeout) else timeout


class DistributedEnvironment:
    """Environment of a job: selects the device of this process and initialises the process group.

    Environment variables take precedence over the arguments, so it works with and without torchrun. An existing process
    group is used unchanged.

    Args:
        backend: backend for `init_process_group`. Default: gloo for the CPU plus the accelerator's default backend.
        log_level: log level of this package.
        device_map: device by local rank. Default: accelerator number `local_rank`, or 0 if only one is visible.
        always: initialise the process group even for a single process.
        no_accelerator: use the CPU even if an accelerator is present.
        timeout: timeout of collectives, and of the wait for all ranks to join, in seconds or as a timedelta. By default
            the wait ends after 10 minutes.
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
        register_early(self._place)
        self._use_device(pick_device(self.local_rank, device_map, no_accelerator))
        if always or self.world_size > 1:
            self._join_process_group(backend, _as_timedelta(timeout))
        logger.info("%s", self)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(rank={self.rank} of {self.world_size}, local_rank={self.local_rank} of "
            f"{self.local_world_size}, device={self.device}, master={self.master_addr}:{self.master_port})"
        )

    @property
    def _place(self) -> Place:
        file = store_file()
        address = (self.master_addr, self.master_port) if file is None else (file,)
        return place_of(self.rank, self.world_size, *address)

    def _use_device(self, device: torch.device) -> None:
        self.device = str(device)
        self.device_type = device.type
        if device.type != "cpu" and device.index is not None:
            # Collectives and allocations without a device index would otherwise all use accelerator 0.
            torch.accelerator.set_device_index(device.index)

    def _join_process_group(self, backend: str | None, timeout: timedelta | None) -> None:
        global _requested_timeout
        _requested_timeout = timeout
        if not dist.is_initialized():
            backend = backend or _default_backend(self.device_type)
            flight_recorder.enable(backend)
            self._init_process_group(backend, timeout)
            # Only for a group created here. The creator of an existing group decides when to destroy it.
            leave_at_exit()
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def _init_process_group(self, backend: str, timeout: timedelta | None) -> None:
        limit = timeout or default_timeout(backend)
        if self.world_size == 1:
            # A single process needs no network. A TCP port could collide with another job on the same machine.
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=limit)
            return
        # Torch's own timeout comes first. The watch notices a rank that has registered and then died.
        limits = Limits(setup_timeout=limit.total_seconds() + _SECONDS_AFTER_TIMEOUT)
        with (
            watching(self._place, limits),
            leaves_on_signal(f"rank {self.rank} waits for the other {self.world_size - 1} ranks"),
        ):
            self._meet(backend, limit, timeout or min(limit, SETUP_LIMIT))

    def _meet(self, backend: str, limit: timedelta, setup_limit: timedelta) -> None:
        rank, world_size = self.rank, self.world_size
        store = job_store(rank, world_size, self.master_addr, self.master_port, setup_limit)
        store.set_timeout(limit)
        wait_for_ranks(store, rank, world_size, setup_limit)
        device, first = torch.device(self.device), self.rank - self.local_rank
        check_devices(store, device, range(first, first + self.local_world_size), self.rank)
        bound = bound_device(device, backend)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit, device_id=bound)


def _as_timedelta(timeout: float | timedelta | None) -> timedelta | None:
    return timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout


def _default_backend(device_type: str) -> str:
    # NCCL cannot transfer CPU tensors, so control messages need gloo beside it.
    accelerator_backend = dist.get_default_backend_for_device(device_type)
    return "gloo" if accelerator_backend == "gloo" else f"cpu:gloo,{device_type}:{accelerator_backend}"
