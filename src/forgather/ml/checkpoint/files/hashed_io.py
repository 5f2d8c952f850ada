"""Hashing file streams: checkpoint files get their checksum in the same pass that writes or reads them.

Large files bypass the page cache with O_DIRECT where the file system supports it. A checkpoint is written once and
rarely read, and filling new cache pages takes longer than the disk itself. A second thread does the disk I/O while
the caller copies and hashes. `planned_file` and `store` write here; `safetensors_io` reads tensors that need staging.
"""

import contextlib
import errno
import fcntl
import io
import mmap
import os
import queue
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Protocol

import numpy as np
import torch
import xxhash

from forgather.ml.checkpoint.errors import CheckpointCorruptError
from forgather.ml.checkpoint.files.pacing import pause
from forgather.ml.checkpoint.files.regular_files import open_regular

CHECKSUM_ALGORITHM = "xxh3_128"
BUFFER_BYTES = 8 * 2**20
# One buffer for the caller, one for the disk thread, one between them.
_NUM_BUFFERS = 3
# Alignment that O_DIRECT requires of offsets, lengths and memory.
_BLOCK_BYTES = 4096
# A smaller read far ahead of the stream is a look at a directory of the file, not part of the stream.
_SMALL_READ_BYTES = 64 * 1024


class Hasher(Protocol):
    """Streaming hash: the methods of `xxhash` objects that are used here."""

    def update(self, data: memoryview) -> None: ...
    def hexdigest(self) -> str: ...


def new_hasher() -> Hasher:
    """Return a new streaming hash of the checksum algorithm of checkpoints."""
    return xxhash.xxh3_128()


class _BufferPool:
    """Pool of page-aligned buffers that are reused for the next file: touching new memory is slower than the disk."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def lend(self, count: int) -> Iterator[list[memoryview]]:
        with self._lock:
            buffers = [self._free.pop() for _ in range(min(count, len(self._free)))]
        buffers += [_new_buffer() for _ in range(count - len(buffers))]
        try:
            yield buffers
        finally:
            with self._lock:
                self._free += buffers


def _new_buffer() -> memoryview:
    # MAP_PRIVATE, because `mmap` shares memory with forked processes by default. Two processes that save at the same
    # time would mix up their bytes.
    return memoryview(mmap.mmap(-1, BUFFER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


buffers = _BufferPool()


class HashingWriter:
    """New file that is hashed while it is written, and fsynced when it is closed.

    Use as a context manager. After an exception inside the block the file is closed without fsync or checksum.
    """

    def __init__(self, path: str, note_bytes: Callable[[memoryview], None] | None = None) -> None:
        self.path = path
        self.size = 0
        self._note_bytes = note_bytes
        self.checksum = ""
        self._hasher = new_hasher()
        # O_EXCL: a checkpoint file is never overwritten, and no symlink is followed.
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._resources = contextlib.ExitStack()
        self._buffers = self._resources.enter_context(buffers.lend(_NUM_BUFFERS))
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[tuple[memoryview, int] | None] = queue.SimpleQueue()
        for buffer in self._buffers[1:]:
            self._free.put(buffer)
        self._current, self._filled = self._buffers[0], 0
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._offset = 0
        self._direct = False

    def __enter__(self) -> "HashingWriter":
        return self

    def __exit__(self, exc_type: type | None, *_: object) -> None:
        try:
            if exc_type is None:
                self._finish()
            else:
                self._stop_thread()
        finally:
            # The thread has ended, so no buffer is in use when it returns to the pool.
            self._resources.close()
            os.close(self._descriptor)

    def write(self, data: memoryview | bytes, also: Hasher | None = None) -> int:
        """Append `data`; `also` is a second hash for only these bytes (the checksum of one tensor)."""
        view = memoryview(data).cast("B")
        position = 0
        while position < len(view):
            count = min(len(view) - position, BUFFER_BYTES - self._filled)
            chunk = self._current[self._filled : self._filled + count]
            _copy_alone(view[position : position + count], chunk)
            # Hash the copy, so that the checksum always matches the bytes that are written.
            self._hasher.update(chunk)
            if also is not None:
                also.update(chunk)
            self._filled += count
            position += count
            if self._filled == BUFFER_BYTES:
                self._hand_over()
        self.size += len(view)
        if self._note_bytes is not None:
            self._note_bytes(view)
        return len(view)

    def flush(self) -> None:
        """Do nothing; `torch.save` requires this method."""

    def _hand_over(self) -> None:
        if self._thread is None:
            # Files that fit one buffer never come here: `_finish` writes them at once, without a thread.
            self._direct = _set_direct(self._descriptor, True)
            thread = threading.Thread(target=self._write_buffers, name="checkpoint-writer", daemon=True)
            thread.start()
            self._thread = thread
        self._full.put((self._current, self._filled))
        pause()
        # Waits for the disk if all buffers are full.
        self._current, self._filled = self._free.get(), 0
        if self._error is not None:
            raise self._error

    def _write_buffers(self) -> None:
        while (item := self._full.get()) is not None:
            buffer, count = item
            if self._error is None:
                try:
                    self._write_at_end(buffer[:count])
                except Exception as error:  # noqa: BLE001 - or the caller would wait for this buffer forever
                    # The caller's thread raises it at its next write or at the end.
                    self._error = error
            self._free.put(buffer)

    def _write_at_end(self, data: memoryview) -> None:
        while len(data):
            try:
                written = os.pwrite(self._descriptor, data, self._offset)
            except OSError as error:
                # A short write or an unusual block size breaks the alignment. Continue through the page cache then.
                if error.errno != errno.EINVAL or not self._direct or not _set_direct(self._descriptor, False):
                    raise
                self._direct = False
                continue
            self._offset += written
            data = data[written:]

    def _stop_thread(self) -> None:
        if self._thread is not None:
            self._full.put(None)
            self._thread.join()

    def _finish(self) -> None:
        self._stop_thread()
        if self._error is not None:
            raise self._error
        if self._direct and self._filled:
            # Direct I/O writes full blocks only, so pad the last block and truncate the file afterwards.
            padded = -(-self._filled // _BLOCK_BYTES) * _BLOCK_BYTES
            self._write_at_end(self._current[:padded])
            os.ftruncate(self._descriptor, self.size)
        else:
            self._write_at_end(self._current[: self._filled])
        os.fsync(self._descriptor)
        self.checksum = self._hasher.hexdigest()


def _set_direct(descriptor: int, on: bool) -> bool:
    """Switch direct I/O (O_DIRECT) of an open file; return False if the file system does not support it."""
    direct = getattr(os, "O_DIRECT", 0)
    if not direct:
        return False
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | direct if on else flags & ~direct)
    except OSError:
        return False
    return True


class HashingReader(io.RawIOBase):
    """File that is hashed while it is read from front to back; small reads elsewhere are not part of the stream.

    Readers of archives look at the directory at the end first and read the tensors in order afterwards. One pass
    over the bytes therefore both fills the tensors and verifies the file. `finish` hashes the remaining bytes and
    returns the checksum.
    """

    def __init__(self, path: str, *, follow: bool = False) -> None:
        super().__init__()
        self._path = path
        self._descriptor = open_regular(path, follow=follow)
        self.size = os.fstat(self._descriptor).st_size
        self._position = 0
        self._hasher = new_hasher()
        self._resources = contextlib.ExitStack()
        self._chunks = self._resources.enter_context(contextlib.closing(_read_ahead(self._descriptor, self.size)))
        self._chunk = memoryview(b"")
        self._hashed = 0
        self.error: Exception | None = None
        """First read error; later reads raise it again."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}[whence]
        if base + offset < 0:
            # A damaged file can lead its reader here, so this is not an OSError of the disk.
            raise ValueError(f"negative position {base + offset}")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = max(0, min(len(buffer), self.size - self._position))
        out = memoryview(buffer).cast("B")[:count]
        distance = self._position - self._hashed
        # Reads behind the stream, and small reads far ahead of it, use pread and leave the stream where it is. Any
        # other read advances the stream: the skipped bytes are hashed, but not returned.
        if distance < 0 or (count < _SMALL_READ_BYTES and distance > _SMALL_READ_BYTES):
            try:
                read_exactly(self._descriptor, out, self._position)
            except (OSError, EOFError) as error:
                raise self._failed(error) from error
        else:
            self._consume(distance, None)
            self._consume(count, out)
        self._position += count
        return count

    def finish(self) -> str:
        """Read the rest of the file and return the checksum of all its bytes."""
        self._consume(self.size - self._hashed, None)
        return self._hasher.hexdigest()

    def close(self) -> None:
        if not self.closed:
            self._resources.close()
            os.close(self._descriptor)
        super().close()

    def _consume(self, count: int, out: memoryview | None) -> None:
        while count > 0:
            if not len(self._chunk):
                self._chunk = self._next_chunk()
            taken = self._chunk[:count]
            self._hasher.update(taken)
            if out is not None:
                _copy(taken, out[: len(taken)])
                out = out[len(taken) :]
            self._chunk = self._chunk[len(taken) :]
            self._hashed += len(taken)
            count -= len(taken)

    def _next_chunk(self) -> memoryview:
        if self.error is not None:
            # The generator has ended with the first error and would only raise StopIteration now.
            raise self.error
        try:
            return next(self._chunks)
        except Exception as error:  # noqa: BLE001 - whatever it was, it is raised below
            failure = self._failed(error)
        raise failure

    def _failed(self, error: Exception) -> Exception:
        """Record the error and return it with the path of the file, which reads by descriptor do not have."""
        if isinstance(error, EOFError):
            self.error = CheckpointCorruptError(f"{self._path} is damaged: {error}")
        elif isinstance(error, OSError):
            self.error = OSError(error.errno, error.strerror or str(error), self._path)
        else:
            self.error = error
        return self.error


def _copy_alone(source: memoryview, target: memoryview) -> None:
    """Copy bytes in this thread only. Large copies release the GIL, or a background save would stop training."""
    if len(source) < _SMALL_READ_BYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


def _copy(source: memoryview, target: memoryview) -> None:
    """Copy bytes with torch, which uses several threads and releases the GIL."""
    # A slice assignment would hold the GIL and stop the read-ahead thread.
    torch.frombuffer(target, dtype=torch.uint8).copy_(torch.frombuffer(source, dtype=torch.uint8))


def read_exactly(descriptor: int, out: memoryview, offset: int) -> None:
    """Fill `out` from `offset`; raise `EOFError` if the file ends too early."""
    while len(out):
        # A single call reads at most 2 GiB and may return less.
        count = os.preadv(descriptor, [out], offset)
        if count == 0:
            raise EOFError(f"the file ends at byte {offset}, {len(out)} bytes early")
        offset += count
        out = out[count:]


def _read_ahead(descriptor: int, size: int) -> Generator[memoryview, None, None]:
    """Yield the file's bytes in order, with read-ahead in a thread; a chunk is valid until the next is taken."""
    free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
    full: queue.SimpleQueue[tuple[memoryview, int] | Exception] = queue.SimpleQueue()
    stopped = threading.Event()

    def read_chunks() -> None:
        try:
            with contextlib.closing(ChunkSource(descriptor, direct=True)) as source:
                for offset in range(0, size, BUFFER_BYTES):
                    buffer, count = free.get(), min(BUFFER_BYTES, size - offset)
                    if stopped.is_set():
                        return
                    source.read(buffer, count, offset)
                    full.put((buffer, count))
        except Exception as error:  # noqa: BLE001 - or the caller would wait for this chunk forever
            full.put(error)

    with buffers.lend(_NUM_BUFFERS if size > BUFFER_BYTES else 1) as lent:
        thread = threading.Thread(target=read_chunks, name="checkpoint-reader", daemon=True)
        for buffer in lent:
            free.put(buffer)
        thread.start()
        try:
            for _ in range(0, size, BUFFER_BYTES):
                item = full.get()
                if isinstance(item, Exception):
                    raise item
                yield item[0][: item[1]]
                free.put(item[0])
        finally:
            # The thread may wait for a free buffer: wake it. Buffers return to the pool only after it has ended.
            stopped.set()
            free.put(lent[0])
            thread.join()


class ChunkSource:
    """Reader that takes a chunk from the page cache if it is there, else reads it with O_DIRECT."""

    def __init__(self, descriptor: int, direct: bool) -> None:
        self._descriptor = descriptor
        self._direct: int | None = None
        if not direct:
            return
        with contextlib.suppress(OSError):
            # A second descriptor, because O_DIRECT allows only aligned offsets and the first must read at any offset.
            # The path in /proc opens the same file, even if its name was replaced meanwhile.
            self._direct = os.open(
                f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0)
            )

    def read(self, buffer: memoryview, count: int, offset: int) -> None:
        if self.is_buffered(buffer[:count], offset) or self._direct is None:
            read_exactly(self._descriptor, buffer[:count], offset)
            return
        done = 0
        while done < count:
            # Full blocks only. The last block may reach beyond the end of the file, where the read stops.
            end = -(-count // _BLOCK_BYTES) * _BLOCK_BYTES
            try:
                read = os.preadv(self._direct, [buffer[done:end]], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                read = 0
            if read == 0:
                # The end of the file, or a position that is not aligned: finish through the page cache.
                read_exactly(self._descriptor, buffer[done:count], offset + done)
                return
            done += read

    def is_buffered(self, out: memoryview, offset: int) -> bool:
        """Return whether to read a chunk through the page cache, because its first block is there or always."""
        if self._direct is None:
            return True
        # One block is enough: a chunk is rarely cached in part. RWF_NOWAIT fails instead of waiting for the disk.
        try:
            return os.preadv(self._descriptor, [out[:_BLOCK_BYTES]], offset, os.RWF_NOWAIT) > 0
        except (OSError, AttributeError):
            return False

    def close(self) -> None:
        if self._direct is not None:
            os.close(self._direct)
