"""Ranks with devices: the process group that a job on accelerators has."""

import os

import torch
import torch.distributed as dist

from forgather.ml.distributed import reset_process_groups


def leave_gloo() -> None:
    """Destroy the gloo group of `run_on_ranks`, so that a trainer initialises its own."""
    # A rank that leaves while another still connects would close the connection.
    dist.barrier()
    dist.destroy_process_group()
    reset_process_groups()


def use_devices() -> int:
    """Replace the gloo group of `run_on_ranks` by one with NCCL for devices, and return the rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    leave_gloo()
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", store=dist.PrefixStore("devices", store), rank=rank, world_size=world_size
    )
    return rank
