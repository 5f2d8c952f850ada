"""Hashed file IO: checksums while reading and writing, for any size, alignment and file system."""

import errno
import os
import random
from pathlib import Path

import pytest
import torch
import xxhash

from forgather.ml.checkpoint.errors import CheckpointCorruptError
from forgather.ml.checkpoint.files.hashed_io import BUFFER_BYTES, HashingReader, HashingWriter
from forgather.ml.checkpoint.files.state_files import read_state, write_state
from forgather.ml.checkpoint.manifest import FileRecord

SIZES = [0, 1, 4095, 4096, 4097, BUFFER_BYTES - 1, BUFFER_BYTES, BUFFER_BYTES + 1, 3 * BUFFER_BYTES + 4096, 30_000_001]


def write(path: Path, data: bytes) -> HashingWriter:
    pieces = random.Random(len(data))
    with HashingWriter(str(path)) as writer:
        position = 0
        while position < len(data):
            count = pieces.randint(1, 9_000_000)
            writer.write(data[position : position + count])
            position += count
    return writer


def drop_from_page_cache(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


@pytest.mark.parametrize("size", SIZES)
def test_written_data_is_read_back_with_its_checksum(tmp_path: Path, size: int) -> None:
    data = random.Random(size).randbytes(size)
    path = tmp_path / "file"
    writer = write(path, data)
    assert (writer.size, writer.checksum) == (size, xxhash.xxh3_128_hexdigest(data))
    assert path.read_bytes() == data
    for prepare in (drop_from_page_cache, Path.read_bytes):
        prepare(path)
        with HashingReader(str(path)) as reader:
            assert reader.finish() == writer.checksum


def test_write_works_without_direct_io() -> None:
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        pytest.skip("needs a writable /dev/shm")
    path = memory / f"forgather-test-{os.getpid()}"
    data = random.Random(0).randbytes(2 * BUFFER_BYTES + 17)
    try:
        assert write(path, data).checksum == xxhash.xxh3_128_hexdigest(data)
        assert path.read_bytes() == data
    finally:
        path.unlink()


def test_random_access_reads_do_not_change_the_checksum(tmp_path: Path) -> None:
    data = random.Random(1).randbytes(3 * BUFFER_BYTES)
    path = tmp_path / "file"
    expected = write(path, data).checksum
    with HashingReader(str(path)) as reader:
        for position, count in [
            (len(data) - 100, 100),
            (0, 50),
            (BUFFER_BYTES + 3, BUFFER_BYTES),
            (10, 2_000_000),
            (7, 3),
        ]:
            reader.seek(position)
            assert reader.read(count) == data[position : position + count]
        assert reader.finish() == expected


def test_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path, b"first")
    with pytest.raises(FileExistsError):
        write(path, b"second")
    assert path.read_bytes() == b"first"


def test_disk_error_reaches_the_caller(tmp_path: Path) -> None:
    """RLIMIT_FSIZE makes the kernel reject writes. It is set in a child, because a lowered hard limit stays lowered."""
    pid = os.fork()
    if pid == 0:
        import resource
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (BUFFER_BYTES, BUFFER_BYTES))
        try:
            with HashingWriter(str(tmp_path / "large")) as writer:
                for _ in range(8):
                    writer.write(bytes(BUFFER_BYTES))
        except OSError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_buffers_are_reused_between_files(tmp_path: Path) -> None:
    """Repeated saves add little memory."""
    data = torch.zeros(24 * 2**20, dtype=torch.uint8)

    def anonymous_memory() -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) * 1024

    def save(name: str) -> None:
        with HashingWriter(str(tmp_path / name)) as writer:
            torch.save(data, writer)  # type: ignore[arg-type]

    save("warm-up")
    before = anonymous_memory()
    for number in range(5):
        save(f"file-{number}")
    assert anonymous_memory() - before < 16 * 2**20


def test_forked_child_does_not_write_into_files_of_its_parent(tmp_path: Path) -> None:
    """Parent and child take their buffers from a pool that was filled before the fork."""
    write(tmp_path / "warm-up", b"warm-up")
    wait, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(wait, 1)
        write(tmp_path / "child", b"theirs" * 100)
        os._exit(0)
    with HashingWriter(str(tmp_path / "parent")) as writer:
        writer.write(b"ours" * 100)
        os.write(go, b"!")
        os.waitpid(child, 0)
    os.close(wait)
    os.close(go)
    assert (tmp_path / "parent").read_bytes() == b"ours" * 100
    assert (tmp_path / "child").read_bytes() == b"theirs" * 100


@pytest.mark.parametrize("is_verified", [True, False])
@pytest.mark.parametrize(
    "failure", [OSError(errno.EIO, os.strerror(errno.EIO)), MemoryError("none left")], ids=["disk", "memory"]
)
def test_read_error_keeps_its_type(
    tmp_path: Path, failure: Exception, is_verified: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read error is not reported as a damaged file or as an internal error."""
    path = str(tmp_path / "state.pt")
    with HashingWriter(path) as writer:
        write_state(writer, torch.zeros(3 * BUFFER_BYTES, dtype=torch.uint8))
    record = FileRecord("state.pt", writer.size, writer.checksum, 0, "state") if is_verified else None

    def preadv(descriptor: int, buffers: list[memoryview], offset: int, *flags: int) -> int:
        if offset <= BUFFER_BYTES < offset + sum(map(len, buffers)):
            raise failure
        return real(descriptor, buffers, offset, *flags)

    real = os.preadv
    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(type(failure)) as raised:
        read_state(path, record)
    assert isinstance(failure, MemoryError) or path in str(raised.value)


def test_file_truncated_while_reading_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path, bytes(5 * BUFFER_BYTES))
    with HashingReader(str(path)) as reader:
        os.truncate(path, 100)
        for _ in range(2):
            with pytest.raises(CheckpointCorruptError, match="file is damaged: the file ends"):
                reader.finish()


def test_writer_thread_error_reaches_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        raise MemoryError("none left")

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(MemoryError, match="none left"), HashingWriter(str(tmp_path / "large")) as writer:
        for _ in range(8):
            writer.write(bytes(BUFFER_BYTES))
