"""Note board: a memory-mapped file with one slot per rank, shared by the ranks of a node and their watchers.

A rank writes its own slot with plain memory stores: no system call, no lock. Slots of ranks on other nodes are copies
that a store thread writes. The header carries the verdict that ends the job, and the report of a rank that fails.
"""

import contextlib
import fcntl
import hashlib
import json
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

from forgather._terminal_text import printable_line
from forgather._watch.processes import is_running, start_time

# Cells of a slot, each an unsigned 64-bit number.
PID, START, LOCAL, STEP, PHASE, COUNT, BATCHES, BEAT, ACTIVITY, LIMIT, STOPPED, DEAD, GONE, DUMPED, PUBLISHED = range(
    15
)
# The last request for stacks that the rank has answered, and the signal that makes it dump its stacks.
STACKS_DONE, DUMP_SIGNAL = 15, 16
NUM_CELLS = 24
# Cells of the header.
VERDICT_SIZE, PUBLISHED_AT, STACKS_ASKED, FAILURE_SIZE = range(4)

_HEADER_BYTES = 16384
_VERDICT_AT = 256
_FAILURE_AT = 8192
FAILURE_BYTES = _HEADER_BYTES - _FAILURE_AT
"""Largest failure report."""
_SLOT_BYTES = 256
_HOST_AT = 8 * NUM_CELLS
_HOST_BYTES = 64
_PREFIX = "forgather-watch-"
_STALE_SECONDS = 30.0
_STACKS = ".stacks"


class Board:
    """Slots of all ranks of a job, as cells that are written in place."""

    def __init__(self, path: str, num_ranks: int) -> None:
        """Open the file, or create it for this user only."""
        self.path = path
        self.num_ranks = num_ranks
        self._opened_at = time.monotonic()
        size = _HEADER_BYTES + num_ranks * _SLOT_BYTES
        # O_NOFOLLOW: the directory may be writable for other users.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(descriptor).st_uid != os.getuid():
                raise PermissionError(f"{path} belongs to another user")
            if os.fstat(descriptor).st_size < size:
                os.ftruncate(descriptor, size)
            self._inode = os.fstat(descriptor).st_ino
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self._bytes = memoryview(self._map)
        self._header = self._bytes[:_VERDICT_AT].cast("Q")
        starts = range(_HEADER_BYTES, size, _SLOT_BYTES)
        self._slots = [self._bytes[start : start + _SLOT_BYTES] for start in starts]
        self.cells = [slot[:_HOST_AT].cast("Q") for slot in self._slots]
        """Cells of each rank's slot."""

    def register(self, rank: int, host: str) -> None:
        """Take the slot of this process, and clear the slots of an earlier job with the same address."""
        for other in self.cells:
            # Copies from other nodes come again within seconds, if their ranks belong to this job.
            if other[PID] and not (other[LOCAL] and is_running(other[PID], other[START])):
                other[PID] = 0
        if not any(other[PID] for other in self.cells):
            # By its time alone, a verdict from before a reboot may seem to be new.
            self._header[VERDICT_SIZE] = self._header[FAILURE_SIZE] = 0
        cells = self.cells[rank]
        for number in range(NUM_CELLS):
            cells[number] = 0
        name = host.encode()[:_HOST_BYTES]
        self._slots[rank][_HOST_AT : _HOST_AT + _HOST_BYTES] = name.ljust(_HOST_BYTES, b"\0")
        cells[LOCAL], cells[START] = 1, start_time(os.getpid()) or 0
        # Last: a slot without a pid is not read.
        cells[PID] = os.getpid()

    def host(self, rank: int) -> str:
        name = bytes(self._slots[rank][_HOST_AT : _HOST_AT + _HOST_BYTES]).rstrip(b"\0")
        # The slot may be a copy from another node.
        return printable_line(name.decode(errors="replace"))

    def slot(self, rank: int) -> bytes:
        """Return the slot as bytes, for the store."""
        return bytes(self._slots[rank])

    def mirror(self, rank: int, slot: bytes) -> None:
        """Copy the slot of a rank on another node."""
        if len(slot) == _SLOT_BYTES and not self.cells[rank][LOCAL]:
            self._slots[rank][:] = slot
            self.cells[rank][LOCAL] = 0

    @property
    def local_ranks(self) -> list[int]:
        return [rank for rank, cells in enumerate(self.cells) if cells[LOCAL] and cells[PID]]

    @property
    def published_at(self) -> int:
        """Time of the last copy of this node's notes to the store, in milliseconds."""
        return self._header[PUBLISHED_AT]

    @published_at.setter
    def published_at(self, milliseconds: int) -> None:
        self._header[PUBLISHED_AT] = milliseconds

    @property
    def stacks_asked(self) -> int:
        """Number of requests for the stacks of all ranks."""
        return self._header[STACKS_ASKED]

    @stacks_asked.setter
    def stacks_asked(self, number: int) -> None:
        self._header[STACKS_ASKED] = number

    @property
    def verdict(self) -> dict[str, Any] | None:
        """The verdict that ends the job, or None."""
        size = self._header[VERDICT_SIZE]
        if size == 0:
            return None
        found: dict[str, Any] = json.loads(bytes(self._bytes[_VERDICT_AT : _VERDICT_AT + size]))
        # An older verdict ended an earlier job with the same address.
        return found if found["at"] >= self._opened_at else None

    def set_verdict(self, verdict: Mapping[str, Any]) -> None:
        """Publish a verdict to all ranks of this node, unless there is one."""
        text = json.dumps({**verdict, "at": time.monotonic()}).encode()
        if self.verdict is None and len(text) <= _FAILURE_AT - _VERDICT_AT:
            self._header[VERDICT_SIZE] = 0
            self._bytes[_VERDICT_AT : _VERDICT_AT + len(text)] = text
            self._header[VERDICT_SIZE] = len(text)

    @property
    def failure(self) -> bytes:
        """Report of the rank that failed first; empty if there is none."""
        return bytes(self._bytes[_FAILURE_AT : _FAILURE_AT + min(self._header[FAILURE_SIZE], FAILURE_BYTES)])

    def set_failure(self, report: bytes, replaces: Callable[[bytes], bool]) -> None:
        """Publish a failure report to all ranks of this node, unless there is one that it does not replace."""
        assert len(report) <= FAILURE_BYTES
        # Several ranks may fail at the same moment.
        with contextlib.suppress(OSError), open(self.path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            present = self.failure
            if not present or replaces(present):
                self._header[FAILURE_SIZE] = 0
                self._bytes[_FAILURE_AT : _FAILURE_AT + len(report)] = report
                self._header[FAILURE_SIZE] = len(report)

    def remove_if_unused(self) -> None:
        """Delete the file if no process that registered in it still runs."""
        running = (cells for cells in self.cells if cells[LOCAL] and not cells[GONE])
        if self.is_current and not any(is_running(cells[PID], cells[START]) for cells in running):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)

    def remove_if_idle(self) -> None:
        """Delete the file if no process is inside a run. The next run creates it again."""
        inside = (cells for cells in self.cells if cells[LOCAL] and cells[PHASE] and not cells[GONE])
        if self.is_current and not any(is_running(cells[PID], cells[START]) for cells in inside):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)

    @property
    def is_current(self) -> bool:
        """Whether other processes that open the path see this board."""
        try:
            return os.stat(self.path).st_ino == self._inode
        except OSError:
            return False

    def close(self) -> None:
        for view in (*self.cells, *self._slots, self._header, self._bytes):
            view.release()
        self._map.close()


def board_path(*identity: object) -> str:
    """Return the path of a job's board: equal for all its ranks on a node, different for other jobs and containers."""
    # Process ids mean nothing in another pid namespace. A network namespace counts as a node.
    spaces = [_namespace(kind) for kind in ("pid", "net")]
    name = hashlib.sha256(repr((identity, spaces)).encode()).hexdigest()[:24]
    return os.path.join(_directory(), f"{_PREFIX}{os.getuid()}-{name}")


def stacks_path(board: Board, rank: int) -> str:
    """Return the path of the file that a rank dumps its stacks into."""
    return f"{board.path}-{rank}{_STACKS}"


def asked_stacks_path(board: Board, rank: int) -> str:
    """Return the path of the file with the stacks that a rank has written on request."""
    return f"{board.path}-{rank}asked{_STACKS}"


def remove_stale_boards() -> None:
    """Delete boards of jobs that were killed together with their watchers."""
    for name in os.listdir(_directory()):
        path = os.path.join(_directory(), name)
        if name.startswith(f"{_PREFIX}{os.getuid()}-"):
            with contextlib.suppress(OSError, ValueError):
                _remove_if_stale(path)


def _remove_if_stale(path: str) -> None:
    found = os.stat(path)
    if time.time() - found.st_ctime < _STALE_SECONDS:
        # The ranks of a job that starts now may not have registered yet.
        return
    if path.endswith(_STACKS):
        # Named after the board, which exists as long as the rank trains.
        if not os.path.exists(path.removesuffix(_STACKS).rpartition("-")[0]):
            os.unlink(path)
        return
    board = Board(path, (found.st_size - _HEADER_BYTES) // _SLOT_BYTES)
    try:
        board.remove_if_unused()
    finally:
        board.close()


def _directory() -> str:
    memory = "/dev/shm"
    return memory if os.access(memory, os.W_OK | os.X_OK) else tempfile.gettempdir()


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""
