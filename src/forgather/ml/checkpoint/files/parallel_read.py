"""Parallel file reads: threads fill memory from a file, and the same pass computes the checksum of the file.

The checksum is one stream, so each thread hashes its chunk when all chunks before it are hashed. A chunk in the page
cache is read straight into its destination. Other chunks are read with O_DIRECT. `state_files` and `safetensors_io`
read here.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from forgather.ml.checkpoint.errors import CheckpointCorruptError
from forgather.ml.checkpoint.files.hashed_io import (
    BUFFER_BYTES,
    ChunkSource,
    Hasher,
    buffers,
    new_hasher,
)

# Linux accepts at most 1024 buffers in one call.
_MOST_BUFFERS = 1024
# Two threads also on one core: one waits for the disk while the other hashes. More than four exceed the memory bus.
_NUM_THREADS = min(4, max(2, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))


class FilePart(NamedTuple):
    """Byte range of a file: its offset, and the memory to fill."""

    offset: int
    out: memoryview


def read_and_hash(
    path: str,
    descriptor: int,
    parts: Sequence[FilePart] = (),
    *,
    direct: bool = True,
    note_bytes: Callable[[int], None] | None = None,
) -> str:
    """Fill disjoint parts of a file and return the checksum of the full file.

    `direct=False` reads through the page cache, for a file that is read again afterwards. `note_bytes` gets the number
    of bytes of each chunk that was read, in any thread.
    """
    size = os.fstat(descriptor).st_size
    hasher = _OrderedHasher(note_bytes)
    _read_chunks(path, descriptor, list(_chunks(_with_gaps(parts, size))), hasher, direct)
    return hasher.hexdigest()


def read_parts(path: str, descriptor: int, parts: Sequence[FilePart]) -> None:
    """Fill disjoint parts of a file, without a checksum."""
    _read_chunks(path, descriptor, list(_chunks(_in_order(parts))), None, direct=False)


def run_in_threads(jobs: Iterable[Callable[[], None]]) -> None:
    """Run jobs in several threads; raise the first error after all threads have ended."""
    waiting = list(jobs)
    queue, lock = iter(waiting), threading.Lock()
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            with lock:
                job = next(queue, None)
            if job is None:
                return
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
                errors.append(error)

    count = min(_NUM_THREADS, len(waiting)) - 1
    threads = [threading.Thread(target=work, name="checkpoint-reader", daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class _Piece(NamedTuple):
    """Adjacent bytes of a file; `out` is None for bytes that are only hashed."""

    offset: int
    length: int
    out: memoryview | None


@dataclass
class _Chunk:
    """Adjacent pieces of at most `BUFFER_BYTES` in total."""

    number: int
    offset: int
    length: int = 0
    pieces: list[_Piece] = field(default_factory=list)


def _in_order(parts: Sequence[FilePart]) -> Iterator[_Piece]:
    return (_Piece(part.offset, len(part.out), part.out) for part in sorted(parts, key=lambda part: part.offset))


def _with_gaps(parts: Sequence[FilePart], size: int) -> Iterator[_Piece]:
    """Yield the parts, and the bytes between them, up to the end of the file."""
    position = 0
    for piece in _in_order(parts):
        if piece.offset > position:
            yield _Piece(position, piece.offset - position, None)
        yield piece
        position = piece.offset + piece.length
    if size > position:
        yield _Piece(position, size - position, None)


def _chunks(pieces: Iterable[_Piece]) -> Iterator[_Chunk]:
    chunk: _Chunk | None = None
    for piece in pieces:
        done = 0
        while done < piece.length:
            offset = piece.offset + done
            if chunk is not None and (chunk.length == BUFFER_BYTES or chunk.offset + chunk.length != offset):
                yield chunk
                chunk = _Chunk(chunk.number + 1, offset)
            chunk = chunk or _Chunk(0, offset)
            count = min(piece.length - done, BUFFER_BYTES - chunk.length)
            out = None if piece.out is None else piece.out[done : done + count]
            chunk.pieces.append(_Piece(offset, count, out))
            chunk.length += count
            done += count
    if chunk is not None:
        yield chunk


class _OrderedHasher:
    """Checksum of chunks that several threads read; each thread waits for its turn."""

    def __init__(self, note_bytes: Callable[[int], None] | None = None) -> None:
        self._hasher: Hasher = new_hasher()
        self._note_bytes = note_bytes
        self._turn = threading.Condition()
        self._next = 0
        self._stopped = False

    def update(self, number: int, views: Sequence[memoryview]) -> None:
        with self._turn:
            self._turn.wait_for(lambda: self._next == number or self._stopped)
        if self._stopped:
            return
        # Outside of the lock, since no other thread has this turn. `xxhash` releases the GIL.
        for view in views:
            self._hasher.update(view)
        with self._turn:
            self._next += 1
            self._turn.notify_all()
        if self._note_bytes is not None:
            self._note_bytes(sum(map(len, views)))

    def stop(self) -> None:
        """Wake the waiting threads after an error: the turn of the failed chunk never ends."""
        with self._turn:
            self._stopped = True
            self._turn.notify_all()

    def hexdigest(self) -> str:
        return self._hasher.hexdigest()


def _read_chunks(
    path: str, descriptor: int, chunks: Sequence[_Chunk], hasher: _OrderedHasher | None, direct: bool
) -> None:
    lock, left = threading.Lock(), iter(chunks)
    stopped = threading.Event()

    def take() -> _Chunk | None:
        with lock:
            return None if stopped.is_set() else next(left, None)

    def work() -> None:
        try:
            with buffers.lend(1) as (scratch,):
                while (chunk := take()) is not None:
                    views = _read_chunk(source, descriptor, chunk, scratch)
                    if hasher is not None:
                        hasher.update(chunk.number, views)
        except BaseException:
            stopped.set()
            if hasher is not None:
                hasher.stop()
            raise

    try:
        with contextlib.closing(ChunkSource(descriptor, direct and hasher is not None)) as source:
            run_in_threads([work] * min(_NUM_THREADS, len(chunks)))
    except EOFError as error:
        raise CheckpointCorruptError(f"{path} is damaged: {error}") from error
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), path) from error


def _read_chunk(source: ChunkSource, descriptor: int, chunk: _Chunk, scratch: memoryview) -> list[memoryview]:
    """Fill the pieces of a chunk and return its bytes, which are valid until `scratch` is used again."""
    if not source.is_buffered(scratch, chunk.offset):
        source.read(scratch, chunk.length, chunk.offset)
        for piece in chunk.pieces:
            if piece.out is not None:
                start = piece.offset - chunk.offset
                _copy(scratch[start : start + piece.length], piece.out)
        return [scratch[: chunk.length]]
    views = []
    for piece in chunk.pieces:
        start = piece.offset - chunk.offset
        views.append(scratch[start : start + piece.length] if piece.out is None else piece.out)
    _read_vector(descriptor, views, chunk.offset)
    return views


def _read_vector(descriptor: int, views: Sequence[memoryview], offset: int) -> None:
    """Fill adjacent views of a file; raise `EOFError` if the file ends too early."""
    left = list(views)
    while left:
        count = os.preadv(descriptor, left[:_MOST_BUFFERS], offset)
        if count == 0:
            raise EOFError(f"the file ends at byte {offset}, {sum(map(len, left))} bytes early")
        offset += count
        # Drop the filled views. A read may stop in the middle of one.
        index = 0
        while count and count >= len(left[index]):
            count -= len(left[index])
            index += 1
        left = left[index:]
        if count:
            left[0] = left[0][count:]


def _copy(source: memoryview, target: memoryview) -> None:
    """Copy bytes without the GIL, and without the threads of torch: several copies run at once already."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
