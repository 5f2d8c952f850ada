"""Devices of ranks: the choice by local rank, and the check that no two processes of a node share one.

Schedulers may show each process a single device, which then has index 0 in all of them. `DistributedEnvironment` calls
these functions.
"""

import os
import socket
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from forgather._job_secret import SealedStore, given_secret

_FOLDER = "forgather/device"
# Variables that renumber the devices that a process sees.
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


def pick_device(
    local_rank: int, device_map: Mapping[int, str | torch.device] | None, no_accelerator: bool
) -> torch.device:
    """Return the device of a process: from the map, else accelerator number `local_rank`, else the CPU."""
    if device_map is not None:
        return _mapped_device(local_rank, device_map)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if no_accelerator or accelerator is None:
        return torch.device("cpu")
    index, num_devices = device_index(local_rank), torch.accelerator.device_count()
    if index >= num_devices:
        raise ValueError(
            f"local rank {local_rank} has no {accelerator.type} device: this node has {num_devices}. Start at most "
            "that many processes per node, pass a device_map, or set no_accelerator=True."
        )
    return torch.device(accelerator.type, index)


def device_index(local_rank: int) -> int:
    """Return the index of the accelerator of a local rank: 0 if only one is visible, else the local rank."""
    # The launcher has given this process its own device. `check_devices` finds processes that share one.
    return 0 if torch.accelerator.device_count() == 1 else local_rank


def _mapped_device(local_rank: int, device_map: Mapping[int, str | torch.device]) -> torch.device:
    if local_rank not in device_map:
        raise ValueError(
            f"device_map has devices for local ranks {sorted(device_map)}, but this is local rank {local_rank}. "
            "Add it to the map, or omit device_map to use one accelerator per process."
        )
    return torch.device(device_map[local_rank])


def check_devices(store: Store, device: torch.device, ranks_of_node: range, rank: int) -> None:
    """Raise `ValueError` on all ranks of a node if two of them use the same accelerator; called by every rank.

    NCCL would fail or hang. Indices cannot be compared, because each process may have its own numbering.
    """
    sealed = SealedStore(store, given_secret())
    sealed.set(f"{_FOLDER}/{rank}", _identity(device))
    if device.type == "cpu":
        return
    ranks_by_device: dict[str, list[int]] = {}
    for one in ranks_of_node:
        ranks_by_device.setdefault(sealed.get(f"{_FOLDER}/{one}").decode(), []).append(one)
    shared = next((ranks for identity, ranks in ranks_by_device.items() if identity and len(ranks) > 1), None)
    if shared is not None:
        visible = ", ".join(f"{name}={os.environ[name]}" for name in _VISIBLE if name in os.environ)
        raise ValueError(
            f"ranks {', '.join(map(str, shared))} of node {socket.gethostname()} use the same {device.type} device: each "
            f"sees {torch.accelerator.device_count()} ({visible or 'none are hidden'}). Start at most one process per device, "
            "let the launcher show each process a different one, pass a device_map, or set no_accelerator=True."
        )


def bound_device(device: torch.device, backend: str) -> torch.device | None:
    """Return the device to bind the process group to, or None for the CPU and for gloo."""
    # With a bound device NCCL connects at once: errors appear at the start, and new groups split its communicator.
    if device.type == "cpu" or device.index is None:
        return None
    accelerator_backend = dist.get_default_backend_for_device(device.type)
    is_used = accelerator_backend != "gloo" and accelerator_backend in backend
    return device if is_used else None


def _identity(device: torch.device) -> str:
    """Return text that is equal for two processes of a node if they use the same accelerator; empty on the CPU."""
    if device.type == "cpu":
        return ""
    module = torch.get_device_module(device.type)
    has_properties = hasattr(module, "get_device_properties")
    unique = getattr(module.get_device_properties(device), "uuid", "") if has_properties else ""
    # Not every device has a unique ID, so the number before renumbering is compared too.
    visible = next((os.environ[name] for name in _VISIBLE if os.environ.get(name)), None)
    names = [] if visible is None else visible.split(",")
    index = device.index or 0
    return f"{device.type} {unique} {names[index] if index < len(names) else index}"
