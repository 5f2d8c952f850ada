"""Judgement of hangs from notes: culprits, excuses, and pauses that are not faults."""

import errno
import math
import os
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from forgather._watch import board as cells_of
from forgather._watch import judge as judgement
from forgather._watch import limits
from forgather._watch.board import Board
from forgather._watch.judge import Finding, Judge
from forgather._watch.limits import Durations, Limits
from forgather._watch.message import describe, names
from forgather._watch.processes import is_stopped, start_time, state_and_start
from forgather._watch.watcher import Settings, Watcher
from tests.support.rank_nursery import REPOSITORY

LIMIT = 60.0
# The process asks its parent to trace it (PTRACE_TRACEME), and then stops, as at a breakpoint of gdb.
TRACED_PROGRAM = "import ctypes, os, signal; ctypes.CDLL(None).ptrace(0, 0, 0, 0); os.kill(os.getpid(), signal.SIGSTOP)"

# A rank that the watcher must end, on a kernel before 5.3 or in a sandbox that does not know the call.
KILL_PROGRAM = """
import subprocess, sys
from forgather._watch.processes import kill, start_time
from tests.support.refused_calls import PIDFD_OPEN, refuse

refuse(PIDFD_OPEN, int(sys.argv[1]))
child = subprocess.Popen(["sleep", "20"])
kill(child.pid, start_time(child.pid))
sys.exit(-child.wait(10))
"""


class Scene:
    """Board with ranks on other nodes, and a clock that the test moves."""

    def __init__(self, path: Path, num_ranks: int) -> None:
        self.board = Board(str(path), num_ranks)
        self.now = 1000.0
        self.judge = Judge(self.board, 0, lambda: self.now, lambda _: LIMIT)
        for rank in range(num_ranks):
            self.put(rank, limits.FORWARD_BACKWARD)

    def put(self, rank: int, phase: int, activity: int = judgement.RUNNING, step: int = 7, **others: int) -> None:
        cells = self.board.cells[rank]
        values = {"PID": 100 + rank, "PHASE": phase, "ACTIVITY": activity, "STEP": step, **others}
        for name, value in values.items():
            cells[getattr(cells_of, name)] = value
        cells[cells_of.COUNT] += 1

    def wait(self, seconds: float, silent: tuple[int, ...] = ()) -> Finding | None:
        """Let time pass in which all ranks but the silent ones stay in contact; return the last finding."""
        finding = None
        for _ in range(int(seconds)):
            self.now += 1.0
            for rank, cells in enumerate(self.board.cells):
                cells[cells_of.PUBLISHED] += rank not in silent
            finding = self.judge.look()
        return finding

    def culprits(self, seconds: float, silent: tuple[int, ...] = ()) -> list[int]:
        finding = self.wait(seconds, silent)
        return [] if finding is None else [view.rank for view in finding.culprits]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path / "board", 3)
    yield scene
    scene.board.close()


def test_rank_that_computes_past_its_limit_is_named_and_waiting_ranks_are_not(scene: Scene) -> None:
    for rank in (0, 2):
        scene.put(rank, limits.FORWARD_BACKWARD, judgement.IN_BACKWARD)
    scene.put(1, limits.LOADING)
    assert scene.culprits(LIMIT - 2) == []
    finding = scene.wait(5)
    assert finding is not None
    text = describe(scene.board, finding, scene.now, "", [])
    assert text.startswith("rank 1 (host , pid 101) has been in loading data for 62 s; ranks 0, 2 wait in reduce.")


def test_rank_that_waits_for_its_device_is_excused_by_a_rank_behind_it(scene: Scene) -> None:
    scene.put(0, limits.FORWARD_BACKWARD)
    scene.put(2, limits.OPTIMIZER)
    scene.put(1, limits.LOADING, LIMIT=600_000)
    assert scene.culprits(300) == []
    assert scene.culprits(310) == [1]


def test_progress_restarts_the_limit(scene: Scene) -> None:
    for _ in range(5):
        for rank in range(3):
            scene.put(rank, limits.FORWARD_BACKWARD)
        assert scene.culprits(LIMIT - 5) == []


def test_ranks_that_wait_for_each_other_are_named_together(scene: Scene) -> None:
    for rank in range(3):
        scene.put(rank, limits.SAVING, judgement.IN_COLLECTIVE)
    finding = scene.wait(LIMIT + 3)
    assert finding is not None
    text = describe(scene.board, finding, scene.now, "", [])
    assert text.startswith("all ranks (ranks 0, 1, 2) have waited for each other in saving for")


def test_silent_rank_is_unreachable(scene: Scene) -> None:
    for rank in range(3):
        scene.put(rank, limits.FORWARD_BACKWARD, judgement.IN_BACKWARD)
    scene.wait(3)
    assert scene.culprits(LIMIT + 3, silent=(2,)) == [2]


def test_dead_rank_is_named_after_the_grace_period_if_all_others_wait(scene: Scene) -> None:
    for rank in (0, 1):
        scene.put(rank, limits.SETUP, judgement.IN_COLLECTIVE)
    scene.put(2, limits.SETUP, DEAD=1)
    assert scene.culprits(judgement.GRACE_SECONDS - 2) == []
    assert scene.culprits(6) == [2]


def test_debugger_stops_all_limits(scene: Scene) -> None:
    scene.put(0, limits.FORWARD_BACKWARD, judgement.IN_COLLECTIVE)
    scene.put(1, limits.FORWARD_BACKWARD, judgement.IN_DEBUGGER)
    assert scene.culprits(10 * LIMIT) == []
    scene.put(1, limits.FORWARD_BACKWARD)
    assert scene.culprits(LIMIT - 5) == []


def test_job_that_is_stopped_as_a_whole_is_no_fault(scene: Scene) -> None:
    for rank in range(3):
        scene.put(rank, limits.FORWARD_BACKWARD, STOPPED=1)
    assert scene.culprits(10 * LIMIT) == []
    for rank in range(3):
        scene.put(rank, limits.FORWARD_BACKWARD, STOPPED=int(rank == 1))
    assert scene.culprits(LIMIT + 5) == [1]


def test_pause_of_the_watcher_does_not_count(scene: Scene) -> None:
    assert scene.culprits(LIMIT - 10) == []
    scene.now += 3600.0
    assert scene.culprits(5) == []


def test_limits_follow_the_median_after_five_durations() -> None:
    durations, seconds = Durations(), Limits(setup_timeout=500.0)
    assert seconds.of(limits.FORWARD_BACKWARD, durations) == (500.0, "setup_timeout")
    durations.steps.extend([1.0] * 5)
    assert seconds.of(limits.OPTIMIZER, durations) == (60.0, "step_timeout")
    durations.steps.extend([20.0] * 50)
    assert seconds.of(limits.REDUCE, durations) == (200.0, "step_timeout")
    assert seconds.of(limits.CALLBACK, durations) == (500.0, "setup_timeout")
    assert Limits(step_timeout=5.0).of(limits.CALLBACK, durations) == (5.0, "step_timeout")
    assert seconds.of(limits.LOADING, durations) == (600.0, "data_timeout")


def test_many_ranks_are_named_as_ranges() -> None:
    assert names([3]) == "rank 3"
    assert names([0, 1, 2]) == "ranks 0, 1, 2"
    assert names([*range(7), 8, 9]) == "ranks 0-6, 8-9"


def test_debugger_that_holds_a_process_is_no_stop(scene: Scene) -> None:
    rank = subprocess.Popen([sys.executable, "-c", TRACED_PROGRAM])
    try:
        _wait_for_state(rank.pid, "t")
        start = start_time(rank.pid)
        assert start is not None and not is_stopped(rank.pid, start)
        scene.put(0, limits.FORWARD_BACKWARD, judgement.IN_COLLECTIVE)
        scene.put(1, limits.FORWARD_BACKWARD, LOCAL=1, PID=rank.pid, START=start)
        assert scene.culprits(10 * LIMIT) == []
        assert scene.board.cells[1][cells_of.ACTIVITY] == judgement.IN_DEBUGGER
    finally:
        rank.kill()
        rank.wait()


def _wait_for_state(pid: int, state: str) -> None:
    deadline = time.monotonic() + 30
    while (found := state_and_start(pid)) is None or found[0] != state:
        assert time.monotonic() < deadline, found
        time.sleep(0.01)


def test_first_rank_clears_the_notes_of_an_earlier_job(tmp_path: Path) -> None:
    """SIGKILL of a whole job leaves its board, with copies of ranks on other nodes. The next job may use its address."""
    earlier = Board(str(tmp_path / "board"), 3)
    earlier.register(0, "a")
    earlier.cells[1][cells_of.PID], earlier.cells[1][cells_of.DEAD] = 4711, 1
    earlier.set_verdict({"text": "rank 1 died", "culprits": [1]})
    earlier.cells[0][cells_of.START] += 1  # An earlier process with the same id.
    earlier.close()
    board = Board(str(tmp_path / "board"), 3)
    board._opened_at = 0.0  # As after a reboot, which restarts the clock.
    board.register(0, "a")
    assert [cells[cells_of.PID] for cells in board.cells] == [os.getpid(), 0, 0]
    assert board.verdict is None
    board.close()


def test_limit_may_be_infinite(tmp_path: Path) -> None:
    board = Board(str(tmp_path / "board"), 1)
    board.register(0, "a")
    board.cells[0][cells_of.PHASE] = limits.FORWARD_BACKWARD
    settings = Settings(
        board=board.path, num_ranks=1, rank=0, limits={"step_timeout": math.inf, "setup_timeout": 1e300}
    )
    assert Watcher(settings, board).tick() is None
    assert board.cells[0][cells_of.LIMIT] > 1e9
    board.close()


def test_compiler_has_the_limit_of_the_setup(tmp_path: Path) -> None:
    board = Board(str(tmp_path / "board"), 1)
    board.register(0, "a")
    board.cells[0][cells_of.PHASE] = limits.FORWARD_BACKWARD
    settings = Settings(board=board.path, num_ranks=1, rank=0, limits={"step_timeout": 30.0, "setup_timeout": 900.0})
    for activity, seconds in ((judgement.IN_COMPILER, 900), (judgement.RUNNING, 30)):
        board.cells[0][cells_of.ACTIVITY] = activity
        Watcher(settings, board).tick()
        assert board.cells[0][cells_of.LIMIT] == seconds * 1000
    board.close()


def test_loading_between_evaluation_batches_keeps_their_durations() -> None:
    durations, cells = Durations(), array("Q", [0] * cells_of.NUM_CELLS)
    for number in range(1, 13):
        cells[cells_of.BATCHES], cells[cells_of.PHASE] = number, limits.EVALUATION if number % 2 else limits.LOADING
        durations.observe(memoryview(cells), float(number))
    assert len(durations.batches) >= 5


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EPERM])
def test_process_is_killed_where_pidfd_open_is_refused(error: int) -> None:
    done = subprocess.run([sys.executable, "-c", KILL_PROGRAM, str(error)], cwd=REPOSITORY, check=False)
    assert done.returncode == signal.SIGKILL
