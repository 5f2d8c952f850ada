"""Recognition of out-of-memory (OOM) errors of accelerators and of the CPU allocator.

The type of an error on the host is RuntimeError, so its text decides. `BatchFinder` and the trial of a model's loss call it.
"""

import torch

_OF_HOST = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory", "out of memory")
_MOST_CAUSES = 16


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, is an out-of-memory error."""
    for _ in range(_MOST_CAUSES):
        if error is None:
            return False
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error) for text in _OF_HOST):
            return True
        error = error.__cause__
    return False
