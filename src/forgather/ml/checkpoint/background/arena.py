"""StagingArena: host memory for the copies of a background save, kept between saves.

The first access to new memory (page faults) is many times slower than a copy, so a thread touches the memory before the
first save needs it. On CUDA the memory is pinned. Invariant: one save uses the arena at a time. `BackgroundSaves` owns
it.
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
    """Growing host buffer. `reserve` makes room for one save, `region` returns parts of it."""

    def __init__(self, pinned: bool | None = None) -> None:
        """Create an empty arena; `pinned=None` pins the memory if CUDA is available."""
        self._pinned = torch.cuda.is_available() if pinned is None else pinned
        self._memory: mmap.mmap | None = None
        self._registered: int | None = None
        self._warming: threading.Thread | None = None

    @property
    def num_bytes(self) -> int:
        return 0 if self._memory is None else len(self._memory)

    def warm_up(self, num_bytes: int) -> None:
        """Allocate memory for saves of this size in a thread, which `reserve` waits for."""
        self._wait_for_warm_up()
        # At normal priority: page faults take seconds per gigabyte on some machines, and the first save waits for them.
        self._warming = threading.Thread(target=self._grow, args=(num_bytes,), name="checkpoint-staging", daemon=True)
        self._warming.start()

    def reserve(self, num_bytes: int) -> None:
        """Make the arena at least this large. Regions of an earlier save must not be in use."""
        self._wait_for_warm_up()
        self._grow(num_bytes)

    def region(self, offset: int, num_bytes: int) -> torch.UntypedStorage:
        """Return a storage of exactly these bytes of the arena, without a copy."""
        assert self._memory is not None, "reserve was called"
        # A separate storage: files contain full storages, and a view of the arena would stand for all of it.
        view = memoryview(self._memory)[offset : offset + num_bytes]
        return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()

    def close(self) -> None:
        """Free the memory as soon as no region is in use."""
        self._wait_for_warm_up()
        self._free()

    def _wait_for_warm_up(self) -> None:
        if self._warming is not None:
            self._warming.join()
            self._warming = None

    def _grow(self, num_bytes: int) -> None:
        if num_bytes <= self.num_bytes:
            return
        # Free first: both buffers together could exceed the limit of the user.
        self._free()
        size = -(-num_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        # MAP_PRIVATE, because `mmap` shares memory with forked data workers by default.
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        content = np.frombuffer(memory, dtype=np.uint8)
        for start in range(0, size, _CHUNK_BYTES):
            content[start : start + _CHUNK_BYTES].fill(0)
        self._memory = memory
        if self._pinned:
            self._pin(content.ctypes.data, size)

    def _pin(self, address: int, size: int) -> None:
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
            self._registered = address

    def _free(self) -> None:
        if self._registered is not None:
            torch.cuda.cudart().cudaHostUnregister(self._registered)
            self._registered = None
        # The mapping goes when the last region that refers to it goes.
        self._memory = None


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
