"""Sentry of a rank: registers the process, starts the watcher process, and ends the rank when a verdict is given.

Its thread beats twice a second and notes what the main thread does. A process has one sentry at a time; an inner run
belongs to the outer one.
"""

import contextlib
import faulthandler
import json
import logging
import multiprocessing.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import IO, Any

from forgather._watch.board import (
    ACTIVITY,
    BEAT,
    COUNT,
    DUMP_SIGNAL,
    DUMPED,
    GONE,
    PID,
    STACKS_DONE,
    Board,
    asked_stacks_path,
    board_path,
    remove_stale_boards,
    stacks_path,
)
from forgather._watch.judge import RUNNING
from forgather._watch.limits import OUTSIDE, SETUP, Limits
from forgather._watch.watcher import EXIT_CODE, TICK_SECONDS, Settings, Watcher
from forgather.ml.distributed.watch import marks
from forgather.ml.distributed.watch.place import Place
from forgather.ml.distributed.watch.stacks import activity_of, all_stacks
from forgather.ml.distributed.watch.store_notes import StoreNotes

logger = logging.getLogger(__name__)

_SWITCH = "FORGATHER_WATCH"
_SOURCE = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 4))
_PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); from forgather._watch.watcher import main; main(sys.argv[2])"
_TICKS_BEFORE_START = 2
_BEATS_BETWEEN_LOOKS = 2
"""A run of a second needs no watcher process."""
_FIRST_SIGNAL = 6
_SECONDS_FOR_OTHERS = 1.5
_SECONDS_TO_DUMP = 4.0
_SECONDS_TO_TELL = 2.5
_SECONDS_TO_CLOSE = 1.0

_lock = threading.Lock()
_registered: "tuple[str, int, Board, int] | None" = None
"""Path of the board, process id, board and rank of this process."""
_sentry: "Sentry | None" = None


class RankHang(RuntimeError):
    """Verdict of the watch, as the launcher reports it. The process ends with exit code 75 without raising it."""


@dataclass(frozen=True)
class Stacks:
    """Signal that dumps the stacks of this process, and the file that receives them."""

    number: int
    file: IO[str]

    @classmethod
    def prepare(cls, path: str) -> "Stacks | None":
        """Register faulthandler for a signal without a handler; None if all are taken."""
        number = next((one for one in _signals() if signal.getsignal(one) == signal.SIG_DFL), None)
        if number is None:
            return None
        file = open(path, "w", opener=_opener)  # noqa: SIM115 - faulthandler writes to it until `close`
        faulthandler.register(number, file=file, all_threads=True)
        return cls(number, file)

    def close(self) -> None:
        faulthandler.unregister(self.number)
        self.file.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.file.name)


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _signals() -> Iterator[int]:
    # Real-time signals first: schedulers and users send SIGUSR2.
    if hasattr(signal, "SIGRTMIN"):
        yield from range(signal.SIGRTMIN + _FIRST_SIGNAL, signal.SIGRTMAX)
    yield signal.SIGUSR2


class Sentry:
    """Watch of this process during one run."""

    def __init__(self, place: Place, limits: Limits, folder: str, phase: int) -> None:
        self._place = place
        self._limits = limits
        self._folder = os.path.abspath(folder) if folder else ""
        self.board = register(place)
        self._cells = self.board.cells[place.rank]
        self._thread_id = threading.get_ident()
        self._stop = threading.Event()
        self._ending = threading.Lock()
        self._watcher: subprocess.Popen[bytes] | None = None
        self._own_watcher: Watcher | None = None
        self._stacks = Stacks.prepare(stacks_path(self.board, place.rank)) if folder else None
        self._cells[DUMP_SIGNAL] = 0 if self._stacks is None else self._stacks.number
        # Requests from before this run are not for it.
        self._cells[STACKS_DONE] = self.board.stacks_asked
        self._seen_count, self._quiet_beats = -1, 0
        self._beat()
        marks.write_to(self._cells)
        marks.note_step(0)
        marks.note(phase)
        self._threads = [threading.Thread(target=self._run, name="watch", daemon=True)]
        if place.num_ranks > 1:
            notes = StoreNotes(self.board)
            self._threads.append(
                threading.Thread(target=self._exchange, args=(notes,), name="watch-store", daemon=True)
            )
        for thread in self._threads:
            thread.start()

    def close(self, has_failed: bool = False) -> None:
        marks.note(OUTSIDE)
        marks.write_to(None)
        self._stop.set()
        verdict = self.board.verdict
        if has_failed and verdict is not None:
            # This rank failed because another rank has already left on the verdict.
            self._end(verdict)
        for thread in self._threads:
            # The store thread may wait for a node that is gone.
            thread.join(_SECONDS_TO_CLOSE)
        if self._watcher is not None:
            self._watcher.kill()
            self._watcher.wait()
        self._cells[DUMP_SIGNAL] = 0
        if self._stacks is not None:
            self._stacks.close()
        with contextlib.suppress(OSError):
            os.unlink(asked_stacks_path(self.board, self._place.rank))
        if self._folder:
            # After the rendezvous the board stays: other ranks must notice a death before training.
            self.board.remove_if_idle()

    # --- threads

    def _run(self) -> None:
        for number in range(sys.maxsize):
            if self._stop.wait(TICK_SECONDS):
                return
            self._beat()
            if number + 1 == _TICKS_BEFORE_START:
                self._start_watcher()
            verdict = self.board.verdict if self._own_watcher is None else self._own_watcher.tick()
            if verdict is not None and not self._stop.is_set():
                self._end(verdict)

    def _beat(self) -> None:
        # Another rank may have cleared the slot, if it registered at the same moment.
        self._cells[PID] = os.getpid()
        self._note_activity()
        self._cells[BEAT] = int(time.monotonic() * 1000)
        asked = self.board.stacks_asked
        if asked != self._cells[STACKS_DONE]:
            self._write_stacks(asked)

    def _note_activity(self) -> None:
        """Look at the stack of a rank without progress since the last beats; reading it keeps the GIL for a millisecond."""
        count = self._cells[COUNT]
        self._quiet_beats = self._quiet_beats + 1 if count == self._seen_count else 0
        self._seen_count = count
        if not self._quiet_beats:
            self._cells[ACTIVITY] = RUNNING
        elif self._quiet_beats % _BEATS_BETWEEN_LOOKS == 0:
            self._cells[ACTIVITY] = activity_of(self._thread_id)

    def _write_stacks(self, asked: int) -> None:
        """Write the stacks of this process, as `forgather control ... stacks` has asked."""
        path = asked_stacks_path(self.board, self._place.rank)
        try:
            with open(path, "w", opener=_opener, errors="replace") as file:
                file.write(all_stacks())
        except OSError as error:
            logger.info("The stacks of this rank cannot be written: %s", error)
        self._cells[STACKS_DONE] = asked

    def _exchange(self, notes: StoreNotes) -> None:
        if not self._stop.wait(_TICKS_BEFORE_START * TICK_SECONDS):
            notes.run(self._stop)

    def _start_watcher(self) -> None:
        stacks = self._stacks
        settings = Settings(
            board=self.board.path,
            num_ranks=self._place.num_ranks,
            rank=self._place.rank,
            limits=asdict(self._limits),
            dump_signal=0 if stacks is None else stacks.number,
            stacks="" if stacks is None else stacks.file.name,
            folder=self._folder,
        )
        command = [sys.executable, "-E", "-s", "-S", "-c", _PROGRAM, _SOURCE, json.dumps(asdict(settings))]
        try:
            if not self.board.is_current:
                raise FileNotFoundError(f"{self.board.path} is gone")
            self._watcher = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd="/")
        except (OSError, ValueError) as error:
            logger.info("The watch runs inside the rank, because no watcher process can be started: %s", error)
            self._own_watcher = Watcher(settings, self.board)
        with contextlib.suppress(OSError):
            remove_stale_boards()

    # --- the end

    def _end(self, verdict: dict[str, Any]) -> None:
        """Log the verdict, leave time for stacks and for other nodes, and end the process with exit code 75."""
        # Acquired for ever: only one of two threads ends the process.
        self._ending.acquire()
        text = verdict["text"]
        logger.error("%s This process ends with exit code %d.", text, EXIT_CODE)
        self._wait_for_dump(self._place.rank in verdict["culprits"])
        if len(self.board.local_ranks) < self._place.num_ranks:
            # Rank 0 usually hosts the store, where other nodes read the verdict.
            time.sleep(_SECONDS_TO_TELL * (2 if self._place.rank == 0 else 1))
        _record(RankHang(text))
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(EXIT_CODE)

    def _wait_for_dump(self, is_culprit: bool) -> None:
        # A rank that left at once would make the others fail on a closed connection, before they read the verdict.
        time.sleep(_SECONDS_FOR_OTHERS)
        deadline = time.monotonic() + (_SECONDS_TO_DUMP if is_culprit and self._watcher is not None else 0.0)
        while not self._cells[DUMPED] and time.monotonic() < deadline:
            time.sleep(TICK_SECONDS / 5)


def _record(error: RankHang) -> None:
    """Write the error file of torchrun, which the launcher reads."""
    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        with contextlib.suppress(OSError):
            get_error_handler().record_exception(error)


@contextlib.contextmanager
def watching(place: Place, limits: Limits, folder: str = "", phase: int = SETUP) -> Iterator[None]:
    """Watch this process during the body. Stacks of a rank that hangs are written to `folder`."""
    sentry = _open(place, limits, folder, phase)
    has_failed = True
    try:
        yield
        has_failed = False
    finally:
        if sentry is not None:
            _close(sentry, has_failed)


def _open(place: Place, limits: Limits, folder: str, phase: int) -> Sentry | None:
    global _sentry
    with _lock:
        if not _is_watchable(place) or (_sentry is not None and _sentry._cells[PID] == os.getpid()):
            return None
        try:
            _sentry = Sentry(place, limits, folder, phase)
        except OSError as error:
            logger.warning("This rank is not watched, because shared memory cannot be used: %s", error)
            return None
        return _sentry


def _close(sentry: Sentry, has_failed: bool) -> None:
    global _sentry
    with _lock:
        sentry.close(has_failed)
        _sentry = None


def current_board() -> tuple[Board, int] | None:
    """Return the board of this process and its rank during a watched run; None outside of one."""
    sentry = _sentry
    return None if sentry is None else (sentry.board, sentry._place.rank)


def registration() -> tuple[Board, int] | None:
    """Return the board that this process is registered on, and its rank; None if it is not registered."""
    return None if _registered is None or _registered[1] != os.getpid() else _registered[2:]


def _is_watchable(place: Place) -> bool:
    # Contradictory variables of the launcher are rejected later, with an error that explains them.
    return os.environ.get(_SWITCH) != "0" and 0 <= place.rank < place.num_ranks


def register_early(place: Place) -> None:
    """Register this process before it meets the others. Without shared memory, it goes unwatched."""
    if place.num_ranks > 1 and _is_watchable(place):
        with contextlib.suppress(OSError):
            register(place)


def register(place: Place) -> Board:
    """Register this process as a rank of its job, until it exits, so that other ranks notice its death."""
    global _registered
    path = board_path(*place.key)
    if _registered is not None and _registered[:2] == (path, os.getpid()) and _registered[2].is_current:
        return _registered[2]
    _leave()
    board = Board(path, place.num_ranks)
    board.register(place.rank, socket.gethostname())
    if _registered is None or _registered[1] != os.getpid():
        # Ranks that torch.multiprocessing has started do not run the functions of atexit.
        multiprocessing.util.Finalize(None, _leave, exitpriority=0)
    _registered = path, os.getpid(), board, place.rank
    return board


def _leave() -> None:
    """Note that this process leaves the job in order."""
    # A forked child inherits the registration of its parent.
    if _registered is not None and _registered[1] == os.getpid():
        _, _, board, rank = _registered
        board.cells[rank][GONE] = 1
        board.remove_if_unused()
