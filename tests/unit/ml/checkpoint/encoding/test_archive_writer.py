"""Streamed `.pt` files: equal in content to those of `torch.save`, for every reader."""

import contextlib
import io
import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from torch import Tensor, nn

from forgather.ml.checkpoint.encoding import archive_writer, torch_archive
from forgather.ml.checkpoint.encoding.archive_writer import StateArchive
from forgather.ml.checkpoint.encoding.codec import encode_state
from forgather.ml.checkpoint.encoding.state_budget import MemoryBudget
from forgather.ml.checkpoint.encoding.torch_archive import TorchArchive
from forgather.ml.checkpoint.files.hashed_io import HashingReader
from forgather.ml.checkpoint.files.state_files import read_state


def attributed() -> OrderedDict[str, Tensor]:
    """State dict of a module: an OrderedDict with the attribute `_metadata`."""
    state = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).state_dict()
    assert isinstance(state, OrderedDict) and hasattr(state, "_metadata")
    return state


def views() -> dict[str, Tensor]:
    whole = torch.arange(24.0).reshape(4, 6)
    return {"whole": whole, "rows": whole[1:3], "column": whole[:, 2], "turned": whole.t(), "again": whole}


def tied() -> dict[str, Tensor]:
    weight = nn.Parameter(torch.randn(5, 3))
    return {"embed.weight": weight, "head.weight": weight}


STATES: dict[str, Callable[[], Any]] = {
    "nothing": dict,
    "numbers and text": lambda: {"step": 3, "rate": 1e-3, "name": "a\u00e9", "flags": [True, None], "pair": (1, 2.5)},
    "views": views,
    "tied": tied,
    "every dtype": lambda: {
        str(dtype): torch.arange(7).to(dtype)
        for dtype in (
            *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
            *(torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.int8, torch.uint8, torch.uint16, torch.bool),
        )
    },
    "empty tensors": lambda: {"rows": torch.empty(0, 4), "columns": torch.empty(3, 0), "scalar": torch.tensor(2.5)},
    "sparse": lambda: {"sparse": torch.eye(3).to_sparse(), "csr": torch.eye(3).to_sparse_csr()},
    "attributes": attributed,
    "optimizer": lambda: {
        "state": {"weight": {"exp_avg": torch.randn(4, 3), "step": torch.tensor(2.0)}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": ["weight"]}],
    },
}


def written(encoded: object) -> bytes:
    output = io.BytesIO()
    StateArchive(encoded).write(output)
    return output.getvalue()


def assert_equal(found: Any, expected: Any, path: str = "") -> None:
    assert type(found) is type(expected) or isinstance(expected, nn.Parameter), path
    if isinstance(expected, Tensor):
        assert (found.dtype, found.shape, found.layout) == (expected.dtype, expected.shape, expected.layout), path
        if expected.layout is torch.strided:
            assert found.stride() == expected.stride() and found.storage_offset() == expected.storage_offset(), path
            bits = [one.detach().contiguous().flatten().view(torch.uint8) for one in (found, expected)]
            assert torch.equal(*bits), path
        else:
            assert torch.equal(found.to_dense(), expected.to_dense()), path
    elif isinstance(expected, dict):
        assert list(found) == list(expected), path
        for key in expected:
            assert_equal(found[key], expected[key], f"{path}.{key}")
        assert_equal(getattr(found, "__dict__", None), getattr(expected, "__dict__", None), f"{path}.__dict__")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), path
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_equal(one, other, f"{path}.{number}")
    else:
        assert found == expected, path


@pytest.mark.parametrize("name", STATES)
def test_torch_load_finds_what_torch_save_would_have_written(name: str, tmp_path: Path) -> None:
    state = STATES[name]()
    ours, theirs = tmp_path / "ours.pt", tmp_path / "theirs.pt"
    ours.write_bytes(written(state))
    torch.save(state, theirs)
    expected = torch.load(theirs, weights_only=True)
    assert_equal(torch.load(ours, weights_only=True), expected)
    # Sparse tensors cannot be mapped, also not from files of torch.save.
    with pytest.raises(RuntimeError) if name == "sparse" and not _can_map(theirs) else contextlib.nullcontext():
        assert_equal(torch.load(ours, weights_only=True, mmap=True), expected)


def _can_map(path: Path) -> bool:
    try:
        torch.load(path, weights_only=True, mmap=True)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("name", STATES)
def test_reader_of_checkpoints_finds_the_same_as_in_a_file_of_torch_save(name: str, tmp_path: Path) -> None:
    encoded = encode_state(STATES[name]())
    ours, theirs = tmp_path / "ours.pt", tmp_path / "theirs.pt"
    ours.write_bytes(written(encoded))
    torch.save(encoded, theirs)
    expected = read_state(str(theirs))
    assert_equal(read_state(str(ours)), expected)
    assert_equal(read_state(str(ours), mapped=True), expected)


def test_tied_tensors_and_views_are_stored_once_and_share_memory(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    path.write_bytes(written({**views(), **tied()}))
    found = torch.load(path, weights_only=True)
    assert len({tensor.untyped_storage().data_ptr() for tensor in found.values()}) == 2
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if "/data/" in name]
    assert names == ["archive/data/0", "archive/data/1"]


def test_content_begins_at_multiples_of_64_bytes(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    path.write_bytes(written([torch.ones(number) for number in range(1, 40)]))
    with HashingReader(str(path)) as reader:
        archive = TorchArchive(reader, MemoryBudget())
        assert all(archive.offset_of(f"data/{number}") % 64 == 0 for number in range(39))


def pieces(tensor: Tensor, size: int) -> Iterator[memoryview]:
    content = tensor.contiguous().flatten().view(torch.uint8).numpy()
    for start in range(0, len(content), size):
        yield memoryview(content[start : start + size])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool], ids=str)
def test_late_tensor_is_written_from_its_chunks(dtype: torch.dtype, tmp_path: Path) -> None:
    late = {"filled": torch.arange(30).reshape(6, 5).to(dtype), "empty": torch.empty(0, 3).to(dtype)}
    state = {"early": torch.ones(3), **late, "count": 2}
    archive = StateArchive(state, lambda value: any(value is tensor for tensor in late.values()))
    assert [id(tensor) for tensor in archive.late_tensors] == [id(tensor) for tensor in late.values()]
    path = tmp_path / "state.pt"
    with path.open("wb") as file:
        archive.write(file, lambda tensor: pieces(tensor, 7))
    assert_equal(torch.load(path, weights_only=True, mmap=True), state)
    assert_equal(read_state(str(path)), state)


def test_wrong_number_of_bytes_is_noticed() -> None:
    tensor = torch.ones(4)
    archive = StateArchive([tensor], lambda value: value is tensor)
    with pytest.raises(AssertionError, match="8 bytes instead of 16"):
        archive.write(io.BytesIO(), lambda tensor: pieces(tensor[:2], 8))


def test_dtypes_without_a_storage_class_cannot_be_late() -> None:
    assert archive_writer.can_be_late(torch.ones(1, dtype=torch.bfloat16))
    assert not archive_writer.can_be_late(torch.ones(1).to(torch.float8_e4m3fn))


@pytest.mark.parametrize("limits", [{"_BIG": 100}, {"_BIG": 600}, {"_MANY": 3}, {"_BIG": 1, "_MANY": 1}], ids=str)
def test_archive_beyond_the_limits_of_zip_is_readable(
    limits: dict[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Lower limits stand for more than 4 GB and 65,535 records, where zip64 fields replace the plain ones."""
    state = {"small": torch.arange(3), "large": torch.arange(64), "last": torch.arange(5.0)}
    plain = written(state)
    for name, limit in limits.items():
        monkeypatch.setattr(archive_writer, name, limit)
    monkeypatch.setattr(torch_archive, "_IN_EXTRA", limits.get("_BIG", 0xFFFFFFFF))
    path = tmp_path / "state.pt"
    path.write_bytes(written(state))
    assert path.stat().st_size > len(plain)
    assert_equal(read_state(str(path)), state)


class _WithHoles:
    """Output that skips large chunks of zeros, so that a file of gigabytes takes neither time nor space."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: memoryview | bytes) -> int:
        if len(data) == len(ZEROS):
            self._file.seek(len(data), io.SEEK_CUR)
            return len(data)
        return self._file.write(data)


ZEROS = bytes(2**25)


def test_tensors_above_4_gb_are_readable(tmp_path: Path) -> None:
    huge = torch.empty(2**30 + 2**25, device="meta")
    state = {"first": torch.arange(3.0), "huge": huge, "last": torch.arange(5)}
    path = tmp_path / "state.pt"
    with path.open("wb") as file:
        StateArchive(state, lambda value: value is huge).write(
            _WithHoles(file), lambda tensor: (memoryview(ZEROS) for _ in range(tensor.nbytes // len(ZEROS)))
        )
    found = torch.load(path, weights_only=True, mmap=True)
    assert found["huge"].shape == huge.shape and not found["huge"][:: 2**24].any()
    assert torch.equal(found["first"], state["first"]) and torch.equal(found["last"], state["last"])
    with HashingReader(str(path)) as reader:
        archive = TorchArchive(reader, MemoryBudget())
        assert archive.size_of("data/1") == huge.nbytes
        assert archive.offset_of("data/2") % 64 == 0 and archive.read("data/2")[8] == 1
    assert zipfile.ZipFile(path).getinfo("archive/data/1").file_size == huge.nbytes


def test_command_line_of_zipfile_lists_the_records(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    path.write_bytes(written(views()))
    listing = subprocess.run([sys.executable, "-m", "zipfile", "-l", path], capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in listing.stdout.splitlines()[1:]] == [
        f"archive/{name}" for name in ("data.pkl", "byteorder", "data/0", "version")
    ]
