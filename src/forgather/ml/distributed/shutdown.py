"""Shutdown of the process group at the end of a successful job.

`DistributedEnvironment` registers it with atexit; the command line calls it when a job is done. A failed process does
not wait for other ranks.
"""

import atexit
import gc
import os
import sys
import time

import torch.distributed as dist

_SECONDS_TO_SETTLE = 0.02


def leave_process_group() -> None:
    """Destroy all process groups while the interpreter is still running.

    A group's thread that releases a tensor during interpreter shutdown would abort the process, and the successful job
    would be reported as failed.
    """
    # Imported here, because `groups` imports `environment`, which imports this module.
    from forgather.ml.distributed.groups import reset_process_groups

    reset_process_groups()
    # Trainers form reference cycles with their callbacks, which would keep groups alive until the interpreter ends.
    gc.collect()
    dist.destroy_process_group()
    # Groups that are still referenced have running threads. The sleep gives them the GIL to release their tensors.
    time.sleep(_SECONDS_TO_SETTLE)


def leave_at_exit() -> None:
    """Register `leave_process_group` with atexit, for a process that ends without an error."""
    # The process ID excludes forked workers, which inherit the atexit handlers.
    atexit.register(_leave, os.getpid())


def _leave(process_id: int) -> None:
    # Python sets `sys.last_type` for an uncaught exception. Destroying groups could then wait for ranks that never
    # come.
    has_failed = getattr(sys, "last_type", None) is not None
    if os.getpid() == process_id and not has_failed and dist.is_available() and dist.is_initialized():
        leave_process_group()
