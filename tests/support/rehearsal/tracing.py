"""Traces of NCCL launches and waits in one process."""

import contextlib
from collections.abc import Iterator
from typing import Any

from tests.support.rehearsal.activation import native


@contextlib.contextmanager
def tracing() -> Iterator[list[dict[str, Any]]]:
    """Trace NCCL in this process; the list is filled when the block ends.

    All ranks must begin and end at the same point of their programs, with no operation under way.
    """
    trace: list[dict[str, Any]] = []
    native().take_trace()
    native().set_tracing(True)
    try:
        yield trace
    finally:
        native().set_tracing(False)
        trace.extend(native().take_trace())
