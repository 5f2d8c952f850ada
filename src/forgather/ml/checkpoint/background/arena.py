"""StagingArena: host memory for the copies of a background save, kept between saves.

The first access to new memory (page faults) is many times slower than a copy, so a thread touches the memory before the
first save needs it, from the start of training on. On CUDA the memory is pinned. Invariant: one save uses the arena at a
time. `BackgroundSaves` owns it.
"""

import logging
import mmap
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger(__name__)

ALIGNMENT = 64
_CHUNK_BYTES = 16 * 2**20
_HUGE_PAGE_BYTES = 2 * 2**20
# Two threads saturate the memory of common machines, and ranks of one node copy at the same time.
_NUM_THREADS = 2


def aligned(num_bytes: int) -> int:
    """Return the size of a region, rounded up so that the next region is aligned for every dtype."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class StagingArena:
    """Growing host buffer. `reserve` makes room for one save, `region` returns parts of it.

    Only one thread calls the methods, and never `expect` or `warm_up` during a save.
    """

    def __init__(self, pinned: bool | None = None) -> None:
        """Create an empty arena; `pinned=None` pins the memory if CUDA is available."""
        self._pinned = torch.cuda.is_available() if pinned is None else pinned
        self._memory: mmap.mmap | None = None
        self._registered: tuple[int, int] | None = None
        self._warming: threading.Thread | None = None
        # The lock guards the fields below, and the end of the thread.
        self._lock = threading.Lock()
        self._touched = 0
        self._target = 0
        self._is_exact = False

    @property
    def num_bytes(self) -> int:
        """Number of bytes that were touched, and therefore take memory."""
        return self._touched

    def expect(self, num_bytes: int, room: int) -> None:
        """Start to touch memory for saves of unknown size, and return at once.

        The address range has `room` bytes: a later `warm_up` of up to this size keeps the touched memory.
        """
        if self._memory is None and num_bytes and self._can_map(max(num_bytes, room)):
            self._begin(num_bytes, is_exact=False)

    def warm_up(self, num_bytes: int) -> None:
        """Start to touch and pin the memory for saves of this size, free the rest, and return at once."""
        if num_bytes <= self._size or self._can_map(num_bytes):
            self._begin(num_bytes, is_exact=True)

    def reserve(self, num_bytes: int) -> None:
        """Make the arena at least this large. Regions of an earlier save must not be in use."""
        if num_bytes > self._size:
            self._map(num_bytes)
        with self._lock:
            # Less than a thread may have been told: this save needs no more.
            self._target = num_bytes
        # Help the thread, since this one has to wait anyway. A region must not be used before both have ended: touching
        # memory overwrites it.
        self._touch()
        self._join()
        self._touch()
        self._pin(num_bytes)

    def region(self, offset: int, num_bytes: int) -> torch.UntypedStorage:
        """Return a storage of exactly these bytes of the arena, without a copy."""
        assert self._memory is not None, "reserve was called"
        # A separate storage: files contain full storages, and a view of the arena would stand for all of it.
        view = memoryview(self._memory)[offset : offset + num_bytes]
        return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()

    def close(self) -> None:
        """Free the memory as soon as no region is in use."""
        with self._lock:
            self._target, self._is_exact = 0, False
        self._join()
        self._unpin()
        # The mapping goes when the last region that refers to it goes.
        self._memory, self._touched = None, 0

    # --- touching

    @property
    def _size(self) -> int:
        return 0 if self._memory is None else len(self._memory)

    def _can_map(self, num_bytes: int) -> bool:
        try:
            self._map(num_bytes)
        except OSError as error:
            # The save itself raises this error, on every rank.
            logger.debug("No staging memory of %d bytes before the first save: %s", num_bytes, error)
            return False
        return True

    def _map(self, num_bytes: int) -> None:
        """Replace the memory by an untouched address range."""
        # Free first: both buffers together could exceed the limit of the user.
        self.close()
        size = -(-num_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        # MAP_PRIVATE, because `mmap` shares memory with forked data workers by default.
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory = memory

    def _begin(self, num_bytes: int, is_exact: bool) -> None:
        with self._lock:
            self._target, self._is_exact = num_bytes, is_exact
            if self._warming is not None:
                # The thread continues to the new target.
                return
            # At normal priority: page faults take seconds per gigabyte on some machines, and the first save waits.
            self._warming = thread = threading.Thread(target=self._warm, name="checkpoint-staging", daemon=True)
        thread.start()

    def _warm(self) -> None:
        is_finished = False
        while not is_finished:
            self._touch()
            with self._lock:
                target, is_exact = self._target, self._is_exact
            if is_exact:
                self._release_beyond(target)
                self._pin(target)
            with self._lock:
                is_finished = (target, is_exact) == (self._target, self._is_exact)
                if is_finished:
                    self._warming = None

    def _touch(self) -> None:
        """Touch the memory up to the target. Several threads may share this work."""
        while True:
            with self._lock:
                start = self._touched
                if self._memory is None or start >= self._target:
                    return
                self._touched = end = min(start + _CHUNK_BYTES, self._size)
            # One byte of each page, because the system clears the page.
            np.frombuffer(self._memory, dtype=np.uint8)[start : end : mmap.PAGESIZE] = 0

    def _release_beyond(self, num_bytes: int) -> None:
        """Return touched memory to the system that saves do not need, if it is more than a chunk."""
        start = -(-num_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        if self._touched - start < _CHUNK_BYTES or self._memory is None or self._registered is not None:
            return
        for low in range(start, self._touched, _CHUNK_BYTES):
            self._memory.madvise(mmap.MADV_DONTNEED, low, min(_CHUNK_BYTES, self._touched - low))
        self._touched = start

    def _join(self) -> None:
        warming = self._warming
        if warming is not None:
            warming.join()

    # --- pinning

    def _pin(self, num_bytes: int) -> None:
        """Register the touched memory with CUDA, unless enough of it is registered."""
        if not self._pinned or self._memory is None or not num_bytes:
            return
        if self._registered is not None and self._registered[1] >= num_bytes:
            return
        self._unpin()
        address, size = np.frombuffer(self._memory, dtype=np.uint8).ctypes.data, self._touched
        # Registered, since torch's own allocator of pinned memory rounds up to a power of two.
        try:
            error = int(torch.cuda.cudart().cudaHostRegister(address, size, 1))
        except (RuntimeError, AttributeError) as failure:
            logger.warning("Staging memory of background saves is not pinned, so copies are slower: %s", failure)
            return
        if error:
            logger.warning(
                "Staging memory of background saves is not pinned, so copies are slower: CUDA error %d", error
            )
        else:
            self._registered = address, size

    def _unpin(self) -> None:
        if self._registered is not None:
            torch.cuda.cudart().cudaHostUnregister(self._registered[0])
            self._registered = None


def copy_on_host(copies: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy bytes between CPU tensors of dtype uint8, given as (target, source), in two threads."""
    num_threads = min(_NUM_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="checkpoint-copy") as executor:
        # The list raises the first error of a task here.
        list(executor.map(_copy_all, _tasks(copies)))


def _tasks(copies: Iterable[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Any, Any]]]:
    """Yield lists of copies with about equal numbers of bytes: parts of a large tensor, or many small ones."""
    task: list[tuple[Any, Any]] = []
    num_bytes = 0
    for target, source in copies:
        into, origin = target.numpy(), source.numpy()
        for start in range(0, len(into), _CHUNK_BYTES):
            task.append((into[start : start + _CHUNK_BYTES], origin[start : start + _CHUNK_BYTES]))
            num_bytes += len(task[-1][0])
            if num_bytes >= _CHUNK_BYTES:
                yield task
                task, num_bytes = [], 0
    yield task


def _copy_all(pieces: list[tuple[Any, Any]]) -> None:
    # NumPy releases the GIL and uses memcpy, which bypasses the cache for large copies. The copy of torch would start
    # more threads in each of these threads.
    for target, source in pieces:
        np.copyto(target, source)
