"""Ctrl-C that libraries swallow: SIGINT is remembered, so that the error that follows is reported as an interruption.

C code may drop the KeyboardInterrupt of a nested import. torch does so while it imports numpy; a later use of the
half-imported module then fails with an unrelated error.
"""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType


@contextmanager
def noted_interrupts() -> Iterator[Sequence[int]]:
    """Yield a list that grows with each SIGINT while Python's default handler would run; it still runs."""
    seen: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield seen
        return

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
