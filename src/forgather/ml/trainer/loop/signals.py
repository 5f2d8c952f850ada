"""Stop signals: preemption (SIGTERM, SIGUSR1) and Ctrl-C end training after the current step, with a checkpoint.

Handlers only record the signal. The training loop polls it at every step, and data workers ignore signals that are sent
to the whole process group. Stop requests of `forgather control` travel on the same way, under names of their own.
"""

import logging
import os
import signal
import threading
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
CONTROL_STOP, CONTROL_ABORT = "forgather control stop", "forgather control abort"
STOP_SIGNAL_NAMES = (*(one.name for one in _SIGNALS), CONTROL_STOP, CONTROL_ABORT)
"""Names of stop requests: signals, and commands of `forgather control`."""


class Preempted(SystemExit):
    """Exit request with code 0, raised after a stop signal and the save that follows it."""

    def __init__(self, signal_name: str, step: int, checkpoint_path: str) -> None:
        super().__init__(0)
        self.signal_name = signal_name
        self.step = step
        self.checkpoint_path = checkpoint_path

    def __str__(self) -> str:
        saved = f", saved {self.checkpoint_path}" if self.checkpoint_path else ""
        return f"preempted by {self.signal_name} at step {self.step}{saved}"


class Aborted(SystemExit):
    """Exit request with code 1, raised after `forgather control ... abort`. Nothing is saved."""

    def __init__(self, step: int, checkpoint_path: str) -> None:
        super().__init__(1)
        self.step = step
        self.checkpoint_path = checkpoint_path

    def __str__(self) -> str:
        newest = (
            f"the newest checkpoint is {self.checkpoint_path}" if self.checkpoint_path else "there is no checkpoint"
        )
        return f"aborted by forgather control at step {self.step}, without saving; {newest}"


class StopSignals:
    """Context manager that records SIGTERM, SIGUSR1 and the first Ctrl-C. A second Ctrl-C raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._was_interrupted = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        # Python allows signal handlers in the main thread only. In other threads the existing handlers stay.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def ask(self, name: str) -> None:
        """Record a request of `forgather control`, as if it were a signal; callable from any thread."""
        self.received = name

    def _note(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGINT:
            if self._was_interrupted:
                raise KeyboardInterrupt
            self._was_interrupted = True
        self.received = name
        again = " Press Ctrl-C again to exit at once, without saving." if number == signal.SIGINT else ""
        logger.warning("%s received: training saves a checkpoint after the current step and exits.%s", name, again)


def leave_signals_to_parent(_worker_id: int) -> None:
    """Keep a DataLoader worker alive when a stop signal reaches all processes of the job; call this in the worker.

    Only a SIGTERM sent by the parent ends the worker. If the parent dies, torch ends the worker.
    """
    # Terminals and cluster schedulers signal workers too. A worker that died would fail the step that training still
    # has to finish and save.
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    # A Python signal handler does not receive the sender's pid; `sigwaitinfo` returns it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_when_parent_says, daemon=True).start()


def _end_when_parent_says() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    # `sys.exit` would end this thread only.
    os._exit(0)
