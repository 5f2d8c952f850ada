"""Mapped state files: tensors without a copy in this process, with the same content and checks."""

from pathlib import Path

import pytest
import torch

from forgather.ml.checkpoint.errors import CheckpointCorruptError
from forgather.ml.checkpoint.files.state_files import file_checksum, read_state
from forgather.ml.checkpoint.manifest import FileRecord
from tests.support.memory import peak_bytes


def write(path: Path) -> FileRecord:
    torch.save({"moment": torch.arange(2**20, dtype=torch.float32), "step": torch.tensor(3.0)}, path)
    return FileRecord(
        path=path.name,
        size=path.stat().st_size,
        checksum=file_checksum(str(path)),
        component="optimizer",
        writer_rank=0,
    )


def test_mapped_state_equals_state_that_was_read(tmp_path: Path) -> None:
    path = tmp_path / "optimizer_state.pt"
    record = write(path)
    read, mapped = read_state(str(path), record), read_state(str(path), record, mapped=True)
    path.unlink()
    assert torch.equal(read["moment"], mapped["moment"]) and read["step"] == mapped["step"]
    # The mapping is private: a change stays in this process, and other tensors are unaffected.
    mapped["moment"].zero_()
    assert read["moment"].any()


def test_mapping_allocates_only_small_tensors(tmp_path: Path) -> None:
    path = tmp_path / "optimizer_state.pt"
    record = write(path)
    assert peak_bytes(lambda: read_state(str(path), record)) >= 2**22
    assert peak_bytes(lambda: read_state(str(path), record, mapped=True)) < 2**16


def test_damage_in_a_mapped_tensor_is_found(tmp_path: Path) -> None:
    path = tmp_path / "optimizer_state.pt"
    record = write(path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointCorruptError, match=r"optimizer_state\.pt"):
        read_state(str(path), record, mapped=True)
