"""Warm-up before a fork: the parent imports once what torch imports on first use."""

import gc
import io
import os

import torch
import torch._dynamo  # The first optimizer of a process imports it.


def warm_up() -> None:
    """Train a step, save and load, with torch only."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    if not torch.accelerator.is_available():
        # A backward pass starts one thread for each accelerator.
        model(torch.zeros(1, 1)).sum().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    torch.load(file)
    get_ready_to_fork()


def get_ready_to_fork() -> None:
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not be forked"
    # A garbage collection in a child would write to, and so copy, all pages that were imported here.
    gc.collect()
    gc.freeze()
