"""Pace: bounds the share of a core that the thread of a background save uses, while training computes on the CPU.

The threads of a training step wait for each other, so every moment that a save takes from one of them delays the step.
A slower save costs no step. `BackgroundSaves` sets the pace of its thread and lifts it when training waits for the save;
`HashingWriter` pauses after each buffer.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

SHARE_OF_CORE = 0.05
"""2.4 GB need 0.7 s of a core for copies and checksums, so such a save takes about 15 s. A step loses more than this share,
because its threads wait for each other: with 0.08 of a core the rate of steps was 0.88."""
_LONGEST_PAUSE = 1.0

_of_thread = threading.local()


class Pace:
    """Time budget of the current thread, from its construction on, until `is_lifted` is set."""

    def __init__(
        self,
        is_lifted: threading.Event,
        share: float = SHARE_OF_CORE,
        *,
        cpu_time: Callable[[], float] = time.thread_time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._is_lifted, self._share, self._cpu_time, self._clock = is_lifted, share, cpu_time, clock
        self._cpu_start, self._start = cpu_time(), clock()

    def delay(self) -> float:
        """Return the seconds that the thread must wait to be within its budget; 0 if the pace is lifted."""
        if self._is_lifted.is_set():
            return 0.0
        used = self._cpu_time() - self._cpu_start
        return max(0.0, used / self._share - (self._clock() - self._start))

    def pause(self) -> None:
        # The work in one buffer is short. The bound keeps a thread alive whose clock has jumped.
        self._is_lifted.wait(min(self.delay(), _LONGEST_PAUSE))


@contextlib.contextmanager
def paced(pace: Pace | None) -> Iterator[None]:
    """Apply a pace to the writes of the current thread."""
    _of_thread.pace = pace
    try:
        yield
    finally:
        _of_thread.pace = None


def pause() -> None:
    """Wait if the current thread has a pace and is ahead of its budget."""
    pace: Pace | None = getattr(_of_thread, "pace", None)
    if pace is not None:
        pace.pause()
