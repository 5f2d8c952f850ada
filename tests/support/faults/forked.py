"""Ranks as forks of a process that has imported everything, and notes that survive a kill."""

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

RAISED = 3
# A survivor must end within ten seconds. The longer limit shows how long a slow survivor takes.
SURVIVOR_SECONDS = 15.0


def fork(work: Callable[[], None]) -> int:
    """Run `work` in a child that exits without clean-up, because gloo threads may still run."""
    child = os.fork()
    if child:
        return child
    code = RAISED
    try:
        work()
        code = 0
    except BaseException:  # noqa: BLE001 - the exit code and the output tell
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Notes:
    """Notes of a rank, in a file that survives a kill."""

    def __init__(self, directory: str, rank: int) -> None:
        self._descriptor = os.open(os.path.join(directory, f"notes{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def add(self, kind: str, value: Any) -> None:
        os.write(self._descriptor, (json.dumps([kind, value]) + "\n").encode())


def read_notes(directory: str, rank: int, kind: str) -> list[Any]:
    with contextlib.suppress(FileNotFoundError), open(os.path.join(directory, f"notes{rank}")) as file:
        return [value for found, value in map(json.loads, file) if found == kind]
    return []


def wait_for(children: Sequence[int], limit: float = SURVIVOR_SECONDS) -> tuple[list[int], float]:
    """Return exit codes, and the seconds from the first exit to the last; kill children that exceed `limit`."""
    codes: dict[int, int] = {}
    first_end = float("inf")
    while len(codes) < len(children):
        for child in [one for one in children if one not in codes]:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                codes[child] = os.waitstatus_to_exitcode(status)
                first_end = min(first_end, time.monotonic())
            elif time.monotonic() > first_end + limit:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.001)
    return [codes[child] for child in children], time.monotonic() - first_end
