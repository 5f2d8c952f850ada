"""Lifeline of a worker: the system ends it when its launcher has ended, also by SIGKILL.

SIGKILL and no stop signal: a job whose launcher was killed is meant to be over. Workers that still saved would refuse
the next start, and nobody would learn how they ended. Committed checkpoints are safe from a kill. The processes that a
worker has started are ended by its watcher. Imports no torch.
"""

import os
import signal
import sys

from forgather._watch.processes import is_running, start_time

_VARIABLE = "FORGATHER_LAUNCHER_PROCESS"
_PR_SET_PDEATHSIG = 1


def tie_workers() -> None:
    """Tell the workers that this process is their launcher; only its main thread starts them."""
    # The signal comes when the thread that has started a worker ends.
    os.environ[_VARIABLE] = f"{os.getpid()} {start_time(os.getpid()) or 0}"


def end_with_launcher() -> None:
    """Let the system kill this process at the end of its launcher, if a launcher has started it."""
    # Not passed on: a program that a worker starts may outlive the launcher.
    given = os.environ.pop(_VARIABLE, "").split()
    if sys.platform != "linux" or len(given) != 2 or not all(map(str.isdecimal, given)):
        return
    pid, start = map(int, given)
    if os.getppid() == pid:
        # Imported here, because most commands have no launcher.
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # It may have ended before the request: its worker then has a parent that is older than the launcher, such as init. The
    # parent of a program in an inherited environment is younger.
    if not is_running(pid, start) and (start_time(os.getppid()) or 0) <= start:
        os.kill(os.getpid(), signal.SIGKILL)
