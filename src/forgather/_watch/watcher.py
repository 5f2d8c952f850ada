"""Watcher process of one rank: judges hangs, has the stacks of its rank dumped, and ends a rank that cannot end itself.

A separate process, because C code that keeps the GIL and a stopped process block every thread of the rank. It ends
with its rank. If a verdict or a signal ended the rank, it also ends what the rank has started, such as data workers.
`main` is the entry point; the rank passes the settings as JSON.
"""

import contextlib
import itertools
import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from forgather._run_files import make_folder_in_run, open_in_run
from forgather._terminal_text import printable
from forgather._watch.board import ACTIVITY, DUMPED, LIMIT, LOCAL, PHASE, PID, START, STOPPED, Board
from forgather._watch.judge import ACTIVE, IN_COMPILER, WAITING, Finding, Judge
from forgather._watch.limits import SETUP, Durations, Limits
from forgather._watch.message import describe
from forgather._watch.processes import descendants, is_running, is_stopped, kill, session_of, stopped_children

TICK_SECONDS = 0.5
EXIT_CODE = 75
"""EX_TEMPFAIL: a launcher with restarts starts the job again."""
_MOST_FILES = 4
_MOST_SECONDS = 1e9
"""Larger limits, such as infinity, do not fit a cell."""
_SECONDS_FOR_OWN_WATCHER = 2.0
_SECONDS_TO_DUMP = 1.0
_SECONDS_TO_WRITE = 3.0
_SECONDS_FOR_OTHERS = 3.0
_SECONDS_TO_EXIT = 9.0
_TICKS_BETWEEN_FAMILIES = 4
_SECONDS_FOR_FAMILY = 2.0
"""Time for the processes that a rank has started to notice its end, and to finish."""


@dataclass(kw_only=True)
class Settings:
    """Settings of a watcher."""

    board: str
    num_ranks: int
    rank: int
    limits: dict[str, Any]
    dump_signal: int = 0
    """Signal that makes the rank dump its stacks; 0: none was free."""
    stacks: str = ""
    """File that the rank dumps its stacks into."""
    folder: str = ""
    """Folder for the stacks of culprits."""


class Watcher:
    """Watch over one rank, and judgement of all."""

    def __init__(self, settings: Settings, board: Board) -> None:
        self._settings = settings
        self._board = board
        self._limits = Limits(**settings.limits)
        self._durations = Durations()
        self._judge = Judge(board, settings.rank, time.monotonic, self._limit_of)
        self._cells = board.cells[settings.rank]
        self._found_at: float | None = None
        self._family: dict[int, int] = {}
        """Processes that the rank has started, and their start times: its children are not known after its end."""
        self._rank = self._cells[PID], self._cells[START]
        self._leads_session = _session(self._rank[0]) == self._rank[0]

    def tick(self) -> dict[str, Any] | None:
        """Update the limit of this rank and judge; return the verdict that ends the job, or None."""
        self._durations.observe(self._cells, time.monotonic())
        limit, name = self._own_limit()
        self._cells[LIMIT] = int(min(limit, _MOST_SECONDS) * 1000)
        verdict = self._board.verdict
        if verdict is None:
            finding = self._judge.look()
            if self._may_speak(finding):
                assert finding is not None
                self._board.set_verdict(self._describe(finding, f"{limit:g} s (watch.{name})"))
                verdict = self._board.verdict
        return verdict

    def _own_limit(self) -> tuple[float, str]:
        own = self._limits.of(self._cells[PHASE], self._durations)
        if self._cells[ACTIVITY] != IN_COMPILER:
            return own
        # torch.compile compiles in any step, at the first batch of a new shape.
        return max(own, self._limits.of(SETUP, self._durations))

    def _limit_of(self, phase: int) -> float:
        return self._limits.of(phase, self._durations)[0]

    def _may_speak(self, finding: Finding | None) -> bool:
        """Return whether this watcher decides: at the second look about its own rank, later about others."""
        if finding is None:
            self._found_at = None
            return False
        first, self._found_at = self._found_at is None, self._found_at or time.monotonic()
        # The watcher of the culprit knows most: the limit by its name, and stopped workers.
        if any(view.rank == self._settings.rank for view in finding.culprits):
            return not first
        return time.monotonic() - self._found_at > _SECONDS_FOR_OWN_WATCHER

    def _describe(self, finding: Finding, limit: str) -> dict[str, Any]:
        ranks = [view.rank for view in finding.culprits]
        is_own = self._settings.rank in ranks
        workers = stopped_children(self._cells[PID]) if is_own else []
        text = describe(self._board, finding, time.monotonic(), limit if is_own else "", workers)
        dumping = [view.rank for view in finding.culprits if view.condition in (ACTIVE, WAITING)]
        if dumping and self._settings.folder:
            files = ", ".join(f"rank{rank}.txt" for rank in dumping[:_MOST_FILES])
            text += f" Python stacks: {os.path.join(self._settings.folder, files)}."
        return {"text": text, "culprits": ranks}

    def carry_out(self, verdict: dict[str, Any]) -> None:
        """Dump the stacks of a culprit, then leave the rank time to exit, and kill it otherwise."""
        if self._settings.rank in verdict["culprits"]:
            self._dump(verdict["text"])
        self.look_at_family()
        for child in stopped_children(self._cells[PID]):
            # The rank may wait for a stopped worker while it ends.
            kill(child, self._family.get(child, 0))
        self._cells[DUMPED] = 1
        # The ranks that can exit come first, so that the launcher sees their message before it sees a killed rank.
        deadline = time.monotonic() + (_SECONDS_FOR_OTHERS if self._cells[STOPPED] else _SECONDS_TO_EXIT)
        while self._rank_runs() and time.monotonic() < deadline:
            time.sleep(TICK_SECONDS / 5)
        if self._rank_runs():
            message = f"error: {verdict['text']} Rank {self._settings.rank} is killed."
            print(printable(message), file=sys.stderr, flush=True)
            _record(verdict["text"])
            self.look_at_family()
            os.kill(self._cells[PID], signal.SIGKILL)
        self._kill_stopped(verdict["culprits"])

    def _kill_stopped(self, culprits: list[int]) -> None:
        """Kill other stopped ranks of this node, which may have had no time to start a watcher."""
        for cells in (self._board.cells[rank] for rank in culprits):
            if cells[LOCAL] and is_stopped(cells[PID], cells[START]) and cells[PID] != self._cells[PID]:
                children = descendants(cells[PID])
                kill(cells[PID], cells[START])
                for child, start in children.items():
                    kill(child, start)

    def look_at_family(self) -> None:
        """Note the processes that the rank has started."""
        found = descendants(self._rank[0])
        # A rank that has ended has no children any more.
        if is_running(*self._rank):
            self._family = {pid: start for pid, start in found.items() if pid != os.getpid()}

    def end_family(self) -> None:
        """Kill what the rank has started and what still runs: nothing outlives its job."""
        deadline = time.monotonic() + _SECONDS_FOR_FAMILY
        while (family := self._left_behind()) and time.monotonic() < deadline:
            time.sleep(TICK_SECONDS / 5)
        for pid, start in family.items():
            kill(pid, start)

    def _left_behind(self) -> dict[int, int]:
        left = {pid: start for pid, start in self._family.items() if is_running(pid, start)}
        for pid in tuple(left):
            left |= descendants(pid)
        if self._leads_session:
            # Those that were started after the last look, or whose parents have ended.
            left |= session_of(*self._rank)
        left.pop(os.getpid(), None)
        left.pop(self._rank[0], None)
        return {pid: start for pid, start in left.items() if is_running(pid, start)}

    def _rank_runs(self) -> bool:
        return os.getppid() == self._cells[PID] and is_running(self._cells[PID], self._cells[START])

    def _dump(self, text: str) -> None:
        settings = self._settings
        if not settings.dump_signal or not settings.stacks or self._cells[STOPPED] or not self._rank_runs():
            return
        os.kill(self._cells[PID], settings.dump_signal)
        time.sleep(_SECONDS_TO_DUMP)
        # The disk of the output directory may be the cause of the hang.
        writer = threading.Thread(target=self._write_stacks, args=(text,), daemon=True)
        writer.start()
        writer.join(_SECONDS_TO_WRITE)

    def _write_stacks(self, text: str) -> None:
        settings = self._settings
        with contextlib.suppress(OSError):
            with open(settings.stacks, errors="replace") as file:
                stacks = file.read()
            output_dir, name = os.path.split(settings.folder)
            make_folder_in_run(output_dir, name)
            with open_in_run(output_dir, os.path.join(name, f"rank{settings.rank}.txt"), "wb") as file:
                file.write(f"{text}\n\n{stacks}".encode(errors="replace"))

    def leave(self) -> None:
        """Delete the files of a rank that was killed."""
        self._board.remove_if_unused()
        if self._settings.stacks:
            with contextlib.suppress(OSError):
                os.unlink(self._settings.stacks)


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _record(text: str) -> None:
    """Write the error file of torchrun for a rank that cannot write it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        details = {"py_callstack": "", "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(path, "w") as file:
            json.dump({"message": {"message": f"RankHang: {text}", "extraInfo": details}}, file)


def main(text: str) -> None:
    """Watch the parent process until it ends or closes the watch; the parent then ends this process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        # Terminals and schedulers signal the whole process group. The rank may still need time to save.
        signal.signal(number, signal.SIG_IGN)
    settings = Settings(**json.loads(text))
    board = Board(settings.board, settings.num_ranks)
    watcher = Watcher(settings, board)
    parent = board.cells[settings.rank][PID]
    for tick in itertools.count():
        if os.getppid() != parent:
            break
        verdict = watcher.tick()
        if verdict is not None:
            watcher.carry_out(verdict)
            break
        if tick % _TICKS_BETWEEN_FAMILIES == 0:
            watcher.look_at_family()
        time.sleep(TICK_SECONDS)
    watcher.leave()
    watcher.end_family()
