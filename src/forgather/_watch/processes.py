"""Processes as /proc shows them: running, stopped, children. Where /proc is missing, a process counts as running.

A pid alone does not identify a process, since the system reuses it. Its start time does.
"""

import contextlib
import os

_STOPPED = "T"
_TRACED = "t"
_ENDED_STATES = ("Z", "X", "x")


def state_and_start(pid: int) -> tuple[str, int] | None:
    """Return the state letter of a process and its start time in clock ticks; None if /proc does not show it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    # The name in parentheses may contain spaces and parentheses.
    fields = text[text.rindex(")") + 2 :].split()
    return fields[0], int(fields[19])


def start_time(pid: int) -> int | None:
    found = state_and_start(pid)
    return None if found is None else found[1]


def is_running(pid: int, start: int) -> bool:
    """Return whether the process that started at `start` exists and has not exited."""
    found = state_and_start(pid)
    if found is not None:
        return found[1] == start and found[0] not in _ENDED_STATES
    return not os.path.isdir("/proc/self") and _exists(pid)


def is_stopped(pid: int, start: int) -> bool:
    """Return whether a signal such as SIGSTOP has stopped the process."""
    return state_and_start(pid) == (_STOPPED, start)


def is_traced(pid: int, start: int) -> bool:
    """Return whether a debugger such as gdb holds the process."""
    return state_and_start(pid) == (_TRACED, start)


def stopped_children(pid: int) -> list[int]:
    """Return the stopped child processes of a process, such as data workers."""
    children: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                children += map(int, file.read().split())
    states = {child: state_and_start(child) for child in children}
    return sorted(child for child, found in states.items() if found is not None and found[0] == _STOPPED)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
