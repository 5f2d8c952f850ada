"""Priority of threads: background work yields the processor to training.

A thread that saves has many seconds, and a training step has none to give away. On Linux each thread has a
nice value; threads that it starts inherit it. The thread of a background save calls this.
"""

import contextlib
import os
import sys
import threading

NICENESS = 15
"""About 3% of the time of a busy core. Threads of one training step wait for each other, so each disturbance counts."""


def yield_to_training() -> None:
    """Lower the priority of the current thread, on systems with priorities per thread."""
    if sys.platform != "linux":
        return
    number = threading.get_native_id()
    # Containers may forbid the call. The save then competes with training, and is still correct.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, number, max(NICENESS, os.getpriority(os.PRIO_PROCESS, number)))
