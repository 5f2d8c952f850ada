"""Python stacks of a process that does not answer, on request by signal."""

import faulthandler
import signal
import sys
from typing import TextIO


def register(file: TextIO | None = None) -> None:
    """Write the stacks of all threads to `file` (default: stderr) whenever this process gets SIGUSR1.

    The file stays open for the rest of the process's life. To be called again after others have handled the signal, whose
    handlers cannot give back one that Python does not know of.
    """
    faulthandler.unregister(signal.SIGUSR1)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr if file is None else file, all_threads=True)
