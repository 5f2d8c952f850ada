"""Parallel reads: content, checksum, and damage in the part of every thread."""

import os
from pathlib import Path

import pytest
import torch

from forgather.ml.checkpoint.errors import CheckpointCorruptError
from forgather.ml.checkpoint.files.hashed_io import BUFFER_BYTES, new_hasher
from forgather.ml.checkpoint.files.mapped_files import TensorCopies, is_mapped
from forgather.ml.checkpoint.files.parallel_read import FilePart, read_and_hash, read_parts, run_in_threads
from forgather.ml.checkpoint.files.state_files import file_checksum, read_state
from forgather.ml.checkpoint.manifest import FileRecord

_NUM_BYTES = 5 * BUFFER_BYTES + 1234


def content(num_bytes: int) -> bytes:
    generator = torch.Generator().manual_seed(0)
    return bytes(torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=generator).numpy())


def checksum(data: bytes) -> str:
    hasher = new_hasher()
    hasher.update(memoryview(data))
    return hasher.hexdigest()


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("is_cached", [True, False])
def test_parts_are_filled_and_the_full_file_is_hashed(tmp_path: Path, direct: bool, is_cached: bool) -> None:
    data, path = content(_NUM_BYTES), tmp_path / "file"
    path.write_bytes(data)
    # Parts of all sizes, out of order, with gaps; one spans several chunks, and many fit into one.
    ranges = [(BUFFER_BYTES - 7, 3 * BUFFER_BYTES), (3, 100), (_NUM_BYTES - 50, 50)]
    ranges += [(1000 + 20 * number, 10) for number in range(1500)]
    parts = [FilePart(start, memoryview(bytearray(length))) for start, length in ranges]
    with path.open("rb") as file:
        if not is_cached:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert read_and_hash(str(path), file.fileno(), parts, direct=direct) == checksum(data)
        for part in parts:
            assert part.out == data[part.offset : part.offset + len(part.out)]
        again = [FilePart(start, memoryview(bytearray(length))) for start, length in ranges]
        read_parts(str(path), file.fileno(), again)
    assert [bytes(part.out) for part in again] == [bytes(part.out) for part in parts]


@pytest.mark.parametrize("mapped", [True, False])
def test_damage_is_found_in_every_chunk(tmp_path: Path, mapped: bool) -> None:
    """Threads take chunks in turn, so a flipped bit in each of several chunks covers the part of each thread."""
    path = tmp_path / "state.pt"
    torch.save({"moment": torch.zeros(_NUM_BYTES, dtype=torch.uint8)}, path)
    record = FileRecord("state.pt", path.stat().st_size, file_checksum(str(path)), 0, "optimizer")
    for position in range(BUFFER_BYTES // 2, _NUM_BYTES, BUFFER_BYTES):
        with path.open("r+b") as file:
            file.seek(position)
            file.write(b"\x01")
            file.flush()
            with pytest.raises(CheckpointCorruptError, match=r"state\.pt is damaged: the file has checksum"):
                read_state(str(path), record, mapped=mapped)
            file.seek(position)
            file.write(b"\x00")
    read_state(str(path), record, mapped=mapped)


def test_file_that_ends_early_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(BUFFER_BYTES))
    part = FilePart(100, memoryview(bytearray(3 * BUFFER_BYTES)))
    with path.open("rb") as file:
        for read in (read_and_hash, read_parts):
            with pytest.raises(CheckpointCorruptError, match="file is damaged: the file ends at byte"):
                read(str(path), file.fileno(), [part])


def test_first_error_of_a_job_is_raised() -> None:
    done: list[int] = []

    def fail() -> None:
        raise KeyError("second")

    with pytest.raises(KeyError, match="second"):
        run_in_threads([lambda: done.append(1), fail])
    run_in_threads([])
    assert done == [1]


def test_mapped_tensors_are_copied_into_existing_tensors(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    saved = {
        "same": torch.randn(300, 100),
        "other dtype": torch.randn(300, 100),
        "transposed": torch.randn(300, 200),
        "slice": torch.randn(300, 100),
    }
    torch.save(saved, path)
    state = read_state(str(path), mapped=True)
    path.unlink()
    targets = {
        "same": torch.zeros(300, 100),
        "other dtype": torch.zeros(300, 100, dtype=torch.float64),
        "transposed": torch.zeros(200, 300).t(),
        "slice": torch.zeros(7, 100),
    }
    copies = TensorCopies()
    for name, target in targets.items():
        assert is_mapped(state[name]) and not is_mapped(target)
        copies.add(target, state[name][20:27] if name == "slice" else state[name])
    copies.run()
    for name, target in targets.items():
        assert torch.equal(target.float(), saved[name][20:27] if name == "slice" else saved[name]), name
