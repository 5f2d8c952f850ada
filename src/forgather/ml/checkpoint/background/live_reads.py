"""LiveReads: tensors that a background save reads from live memory, because they exceed the staging memory.

Training must not change them before the save has read all of them; `UpdateGate` holds it back. Live tensors are written
first, through the ring of buffers of the file writer, and staged copies afterwards. With a limit of L bytes for a state
of N bytes, they are therefore read after the disk has taken N - L bytes, as early as with a ring of L bytes in between.
A read is complete when the bytes are in a buffer of the file, or when the round of the shard exchange that sends them
has ended. The snapshot reports both.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np


class MemoryRange(NamedTuple):
    """Addresses of a tensor in host memory."""

    start: int
    end: int


class LiveReads:
    """Outstanding reads of live tensors: memory ranges by index of the file, and rounds of the shard exchange."""

    def __init__(
        self,
        files: Mapping[int, Sequence[MemoryRange]],
        num_rounds: int = 0,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`files` has an entry for each file with live tensors, empty if they are not in host memory.

        `num_rounds` is the number of exchange rounds that send live tensors. `check` runs in the thread of the save
        when all tensors are read, and raises if one has changed meanwhile.
        """
        self._check = check
        self._ranges = {number: set(ranges) for number, ranges in files.items()}
        # Ranges of a device are unknown here, and a part of a tensor may be copied first: such files end as a whole.
        self._exact = {number for number, ranges in self._ranges.items() if ranges}
        self._rounds_left = num_rounds
        self._is_done = threading.Event()
        self._look()

    @property
    def is_done(self) -> bool:
        return self._is_done.is_set()

    def note_bytes(self, number: int, data: memoryview) -> None:
        """Record that file `number` has taken over these bytes."""
        if number not in self._exact or not len(data):
            return
        start = np.frombuffer(data, dtype=np.uint8).ctypes.data
        end = start + len(data)
        self._ranges[number] = {one for one in self._ranges[number] if not (start <= one.start and one.end <= end)}
        if not self._ranges[number]:
            self.note_file(number)

    def note_file(self, number: int) -> None:
        """Record that file `number` needs no live tensor any more."""
        self._exact.discard(number)
        if self._ranges.pop(number, None) is not None:
            self._look()

    def note_round(self, num_done: int) -> None:
        """Record that the first `num_done` rounds of the exchange have ended."""
        if num_done >= self._rounds_left:
            self._rounds_left = 0
            self._look()

    def end(self) -> None:
        """Release training: the save has ended."""
        self._is_done.set()

    def wait(self) -> None:
        """Block until all live tensors are read, or the save has ended."""
        self._is_done.wait()

    def _look(self) -> None:
        if not self._ranges and not self._rounds_left and not self._is_done.is_set():
            self._check()
            self._is_done.set()
