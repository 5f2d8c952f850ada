"""The outermost function of a training script."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch.distributed.elastic.multiprocessing.errors import record

P = ParamSpec("P")
R = TypeVar("R")


def record_entry_point(fn: Callable[P, R]) -> Callable[P, R | None]:
    """Decorate a script's main function so that torchrun prints the root cause of a failed job.

    The exception is written to the file that torchrun names and raised again; without torchrun nothing changes.
    Returns None where `fn` calls `sys.exit(0)`.
    """
    return record(fn)
