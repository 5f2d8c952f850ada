"""Expandable segments of the CUDA allocator for trainers that the command line has not started.

The setting applies to memory that is allocated afterwards, so `prepare_device` makes it before the first allocation.
"""

import os

import torch

from forgather._allocator import EXPANDABLE, request_expandable_segments


def use_expandable_segments(device: torch.device) -> None:
    """Turn on expandable segments for an NVIDIA device without allocated memory, unless the user has set the allocator."""
    if device.type != "cuda" or torch.version.cuda is None:
        return
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved(device) > 0:
        return
    if request_expandable_segments(os.environ):
        # Torch may have read the variable already, when it was imported.
        torch._C._accelerator_setAllocatorSettings(EXPANDABLE)
