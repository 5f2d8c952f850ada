"""The outermost function of a training script."""

import functools
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch.distributed as dist

from forgather.ml.distributed.agreement import DistributedError

P = ParamSpec("P")
R = TypeVar("R")

_SECONDS_FOR_THE_CAUSE = 3.0
_SIGNS_OF_LOST_CONTACT = (
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

    The exception is written to the file that torchrun names and raised again; without torchrun nothing changes. A rank
    that only lost contact with another waits a moment first: torchrun reports whoever fails first, and ends the others.
    Returns None where `fn` calls `sys.exit(0)`.
    """
    # Imported here: a run in one process has no use for torch's elastic agent.
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
    """Whether an error is what a rank sees of another's end, and not a cause itself."""
    if isinstance(error, DistributedError):
        return error.rank is None and not _has_cause_of_its_own(error)
    if isinstance(error, dist.DistError | ConnectionError | TimeoutError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS_OF_LOST_CONTACT)


def _has_cause_of_its_own(error: DistributedError) -> bool:
    """Whether the rank that lost contact was failing already."""
    return error.__cause__ is not None and not lost_contact(error.__cause__)
