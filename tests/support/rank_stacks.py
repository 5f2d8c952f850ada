"""Python stacks of a hanging process, printed on a real-time signal."""

import faulthandler
import signal
import sys
from typing import TextIO

# Neither training nor the watch over ranks handles this signal.
STACKS_SIGNAL = signal.SIGRTMAX


def register(file: TextIO | None = None) -> None:
    """Write the stacks of all threads to `file` (default: stderr) whenever this process gets STACKS_SIGNAL.

    The file stays open until the process ends. Call this again after other code has handled STACKS_SIGNAL, because
    `signal.signal` cannot restore faulthandler's handler.
    """
    faulthandler.unregister(STACKS_SIGNAL)
    faulthandler.register(STACKS_SIGNAL, file=sys.stderr if file is None else file, all_threads=True)
