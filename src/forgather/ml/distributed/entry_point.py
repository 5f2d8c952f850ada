"""Entry point of a training script: reports the root cause of a failed job to torchrun.

Scripts decorate their main function with `record_entry_point`. A rank that only lost contact with another rank fails
later than the rank that caused it.
"""

import functools
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch.distributed as dist

from forgather.ml.distributed.agreement import DistributedError

P = ParamSpec("P")
R = TypeVar("R")

_SECONDS_FOR_THE_CAUSE = 3.0
# Lower-case parts of the messages of gloo, NCCL and TCPStore. These backends raise plain RuntimeErrors for a lost peer.
SIGNS_OF_LOST_CONTACT = (
    *("connection closed by", "connection reset by peer", "broken pipe", "gloo/transport", "connectfullmesh failed"),
    *(
        "nccl error",
        "ncclsystemerror",
        "ncclremoteerror",
        "nccl communicator was aborted",
        "tcpstore",
        "wait timeout after",
    ),
)


def record_entry_point(fn: Callable[P, R]) -> Callable[P, R | None]:
    """Decorate a script's main function so that torchrun prints the root cause of a failed job.

    The exception is written to the error file of torchrun and raised again. Without torchrun nothing changes. A rank
    that only lost contact with another rank waits 3 seconds before it raises. torchrun reports the rank that fails
    first and ends the others. Returns None if `fn` calls `sys.exit(0)`.
    """
    # Imported here, because a single-process run does not need the elastic agent of torch.
    from torch.distributed.elastic.multiprocessing.errors import record

    @functools.wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            if lost_contact(error):
                time.sleep(_SECONDS_FOR_THE_CAUSE)
            raise

    return record(run)


def lost_contact(error: BaseException) -> bool:
    """Return whether an error only reports a lost connection to another rank and is not itself the cause."""
    if isinstance(error, DistributedError):
        return error.rank is None and not _has_cause_of_its_own(error)
    if isinstance(error, dist.DistError | ConnectionError | TimeoutError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in SIGNS_OF_LOST_CONTACT)


def _has_cause_of_its_own(error: DistributedError) -> bool:
    """Return whether the rank had already failed when it lost contact."""
    return error.__cause__ is not None and not lost_contact(error.__cause__)
