"""Processes as /proc shows them: running, stopped, descendants. Where /proc is missing, a process counts as running.

A pid alone does not identify a process, since the system reuses it. Its start time does.
"""

import contextlib
import os
import signal

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
    states = {child: state_and_start(child) for child in _children(pid)}
    return sorted(child for child, found in states.items() if found is not None and found[0] == _STOPPED)


def descendants(pid: int) -> dict[int, int]:
    """Return the children of a process, their children and so on, with their start times."""
    found: dict[int, int] = {}
    waiting = _children(pid)
    while waiting:
        child = waiting.pop()
        start = start_time(child)
        if start is not None and child not in found:
            found[child] = start
            waiting += _children(child)
    return found


def session_of(leader: int, since: int) -> dict[int, int]:
    """Return the processes of a session that started at `since` or later, with their start times."""
    found: dict[int, int] = {}
    with contextlib.suppress(OSError):
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            with contextlib.suppress(OSError):
                start = start_time(pid)
                if os.getsid(pid) == leader and start is not None and start >= since:
                    found[pid] = start
    return found


def kill(pid: int, start: int) -> None:
    """Send SIGKILL to a process if it is still the one that started at `start`."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        try:
            # The descriptor refers to one process, also if its id is given to another one after the look at it.
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        except (AttributeError, OSError):
            # Not Linux, a kernel before 5.3, or a sandbox that refuses the call.
            if is_running(pid, start):
                os.kill(pid, signal.SIGKILL)
            return
        try:
            if is_running(pid, start):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)


def _children(pid: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            # A thread may end meanwhile.
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                children += map(int, file.read().split())
    return children


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
