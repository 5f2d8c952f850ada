"""Python stacks of a hanging process, printed on SIGUSR1."""

import faulthandler
import signal
import sys
from typing import TextIO


def register(file: TextIO | None = None) -> None:
    """Write the stacks of all threads to `file` (default: stderr) whenever this process gets SIGUSR1.

    The file stays open until the process ends. Call this again after other code has handled SIGUSR1, because
    `signal.signal` cannot restore faulthandler's handler.
    """
    faulthandler.unregister(signal.SIGUSR1)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr if file is None else file, all_threads=True)
