"""Stop signals during the rendezvous: SIGTERM, SIGUSR1 and Ctrl-C end a process that waits for the other ranks.

Joining a process group blocks inside C++, where Python cannot run signal handlers, and the missing rank may never join.
Nothing has been trained at this point, so there is nothing to save. `DistributedEnvironment` uses this context.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_GRACE_SECONDS = 1.0


@contextlib.contextmanager
def leaves_on_signal(waits_for: str) -> Iterator[None]:
    """End the process with exit code 128 plus the signal's number if a stop signal arrives in the body.

    Python code in the body gets `SystemExit`. If the main thread stays in C++, a second thread ends the process. In other
    threads, and for ignored signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    has_left = threading.Event()

    def leave(number: int, _: FrameType | None) -> None:
        has_left.set()
        _say(number, waits_for)
        raise SystemExit(128 + number)

    numbers = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    watcher = threading.Thread(target=_watch, args=(read_end, has_left, numbers, waits_for), daemon=True)
    before = {number: signal.signal(number, leave) for number in numbers}
    # The handler in C writes the number of each signal into the pipe, also while the main thread is in C++.
    wake_up = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wake_up)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(write_end)
        watcher.join()
        os.close(read_end)


def _watch(read_end: int, has_left: threading.Event, numbers: list[signal.Signals], waits_for: str) -> None:
    while received := os.read(read_end, 1):
        number = received[0]
        if number in numbers and not has_left.wait(_GRACE_SECONDS):
            _say(number, waits_for)
            os._exit(128 + number)


def _say(number: int, waits_for: str) -> None:
    logger.warning(
        "%s received while %s: the process ends, with nothing to save.", signal.Signals(number).name, waits_for
    )
    sys.stdout.flush()
    sys.stderr.flush()
