"""Ranks with devices, inside `run_on_ranks`."""

import torch
import torch.distributed as dist

from forgather.ml.distributed import StaticDistributedEnvironment


def use_device() -> int:
    """Make the device with the number of this rank the current one, and return the rank."""
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    return rank


def environment() -> StaticDistributedEnvironment:
    """Return the environment of this rank, with its device."""
    rank, size = use_device(), dist.get_world_size()
    return StaticDistributedEnvironment(
        rank=rank,
        local_rank=rank,
        world_size=size,
        local_world_size=size,
        device=f"cuda:{rank}",
        device_type="cuda",
    )
