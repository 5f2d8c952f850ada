"""Stacks of all ranks on request: of this node through the note board, of other nodes through the store.

The watch thread of each rank writes its stacks while it has the GIL. If C code keeps the GIL, a signal makes
faulthandler dump them. Nothing is stopped or ended.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable

from forgather._job_secret import SealedStore
from forgather._watch.board import (
    DUMP_SIGNAL,
    GONE,
    PHASE,
    PID,
    STACKS_DONE,
    START,
    Board,
    asked_stacks_path,
    stacks_path,
)
from forgather._watch.limits import OUTSIDE
from forgather._watch.processes import is_running, is_stopped
from forgather.ml.distributed.watch.sentry import current_board
from forgather.ml.distributed.watch.stacks import all_stacks
from forgather.ml.distributed.watch.store_notes import ask_for_stacks, own_connection, read_stacks, stacks_key

_SECONDS_TO_WRITE = 2.5
_SECONDS_TO_DUMP = 1.0
_SECONDS_OF_STORE = 8.0
_POLL_SECONDS = 0.05
_one_at_a_time = threading.Lock()


def collect_stacks() -> dict[int, str]:
    """Return the Python stacks of each rank, or a sentence about a rank that gives none. Takes up to some seconds."""
    watched = current_board()
    if watched is None:
        # Without a watch, only this process can be looked at.
        return {0: all_stacks()}
    with _one_at_a_time:
        return _of_all_ranks(watched[0])


def _of_all_ranks(board: Board) -> dict[int, str]:
    number = board.stacks_asked + 1
    local = board.local_ranks
    elsewhere = [rank for rank in range(board.num_ranks) if rank not in local]
    connection = own_connection() if elsewhere else None
    store = None if connection is None else connection.sealed
    if store is not None:
        ask_for_stacks(store, number)
    board.stacks_asked = number
    _wait(lambda: all(_has_written(board, rank, number) for rank in local), _SECONDS_TO_WRITE)
    stacks = {rank: _of_local(board, rank, number) for rank in local}
    stacks.update(_of_others(store, elsewhere, number))
    return dict(sorted(stacks.items()))


def _has_written(board: Board, rank: int, number: int) -> bool:
    return board.cells[rank][STACKS_DONE] >= number


def _of_local(board: Board, rank: int, number: int) -> str:
    cells = board.cells[rank]
    if _has_written(board, rank, number):
        return read_stacks(asked_stacks_path(board, rank))
    if cells[GONE] or not is_running(cells[PID], cells[START]):
        return "The process has ended."
    if is_stopped(cells[PID], cells[START]):
        return "The process is stopped (SIGSTOP), so it cannot show its stacks."
    if cells[PHASE] == OUTSIDE or not cells[DUMP_SIGNAL]:
        return "The process is outside of training, and does not answer."
    return _dumped(stacks_path(board, rank), cells[PID], cells[DUMP_SIGNAL])


def _dumped(path: str, pid: int, signal_number: int) -> str:
    """Have faulthandler dump the stacks of a process whose threads cannot run, because C code keeps the GIL."""
    before = _size(path)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal_number)
    _wait(lambda: _size(path) > before, _SECONDS_TO_DUMP)
    # The dump has no end mark, and takes milliseconds.
    time.sleep(_SECONDS_TO_DUMP / 4)
    try:
        with open(path, "rb") as file:
            file.seek(before)
            return file.read().decode(errors="replace") or "The process does not answer."
    except OSError as error:
        return f"The stacks cannot be read: {error.strerror}."


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _of_others(store: SealedStore | None, ranks: Iterable[int], number: int) -> dict[int, str]:
    if store is None:
        return dict.fromkeys(ranks, "The rank is on another node, and cannot be reached.")
    missing = list(ranks)
    found: dict[int, str] = {}

    def has_all() -> bool:
        for rank in [one for one in missing if one not in found]:
            stacks = store.find(stacks_key(number, rank))
            if stacks is not None:
                found[rank] = stacks.decode(errors="replace")
        return len(found) == len(missing)

    _wait(has_all, _SECONDS_OF_STORE)
    return {rank: found.get(rank, "The rank is on another node, and does not answer.") for rank in missing}


def _wait(is_done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_done() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
