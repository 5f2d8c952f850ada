"""Leaving a job whose work is done."""

import atexit
import gc
import os
import sys
import time

import torch.distributed as dist

_SECONDS_TO_SETTLE = 0.02


def leave_process_group() -> None:
    """Give up all groups while Python still runs.

    Threads of a group that let go of a tensor while the interpreter is ending would abort the process, and so make a
    failure of a job that has succeeded.
    """
    # Here, since groups know the environment, which knows this module.
    from forgather.ml.distributed.groups import reset_process_groups

    reset_process_groups()
    # Trainers are in cycles with their callbacks, and would keep groups until the end.
    gc.collect()
    dist.destroy_process_group()
    # What is still referred to has threads; they get the interpreter's lock now.
    time.sleep(_SECONDS_TO_SETTLE)


def leave_at_exit() -> None:
    """Let this process leave its groups when it ends, unless it ends by an error: others may be waiting for it then."""
    atexit.register(_leave, os.getpid())


def _leave(process_id: int) -> None:
    has_failed = getattr(sys, "last_type", None) is not None
    if os.getpid() == process_id and not has_failed and dist.is_available() and dist.is_initialized():
        leave_process_group()
