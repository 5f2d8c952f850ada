"""What a process does before others are forked from it: whatever torch imports on first use is then imported once."""

import gc
import io
import os

import torch
import torch._dynamo  # imported by the first optimizer of a process


def warm_up() -> None:
    """Train a step, save and load, with torch alone."""
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
    # A collection in a child would touch, and so copy, all that was imported here.
    gc.collect()
    gc.freeze()
