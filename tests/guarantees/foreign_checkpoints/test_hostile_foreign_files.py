"""Hostile foreign directories: code in their files never runs, and rejected files are named."""

import io
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from forgather.ml.checkpoint.errors import CheckpointError, CheckpointLoadError
from tests.support.foreign_directories import (
    ImportingJob,
    content_of,
    save_unversioned,
    save_with_dcp,
    train_with_transformers,
)
from tests.support.tiny_models import TokenModel, tiny_llama, weights
from tests.support.tiny_parallel import captured_logs


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self._marker}",)


def archived(marker: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save({"state": {}, "param_groups": [], "bomb": Bomb(marker)}, buffer)
    return buffer.getvalue()


def legacy(marker: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save({"state": {}, "bomb": Bomb(marker)}, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def bare(marker: Path) -> bytes:
    return pickle.dumps(Bomb(marker))


def put(path: Path, kind: str) -> None:
    """Replace a file with a FIFO, a symlink or a directory."""
    elsewhere = path.parent.parent / f"elsewhere-{path.name}"
    shutil.move(path, elsewhere)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(elsewhere)
    else:
        path.mkdir()


@pytest.fixture(scope="module")
def of_transformers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("transformers")
    train_with_transformers(folder, tiny_llama(1), steps=2)
    return folder / "checkpoint-2"


# --- state files: left out and named


@pytest.mark.parametrize("write", [archived, legacy, bare], ids=lambda value: value.__name__)
@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "training_args.bin", "rng_state.pth"])
def test_pickle_with_code_is_skipped_and_named(
    name: str, write: Callable[[Path], bytes], of_transformers: Path, tmp_path: Path
) -> None:
    theirs, marker = tmp_path / "theirs", tmp_path / "marker"
    shutil.copytree(of_transformers, theirs)
    (theirs / name).write_bytes(write(marker))
    job = ImportingJob(tmp_path / "run", tiny_llama(2))
    with captured_logs() as lines:
        job.load(theirs)
    assert not marker.exists()
    (message,) = [line for line in lines if line.startswith("Imported")]
    if name in ("optimizer.pt", "scheduler.pt"):
        assert f"  - {name.removesuffix('.pt')}: {theirs / name} was rejected" in message
        assert (job.moments() == {}) == (name == "optimizer.pt")
        assert (job.scheduler.last_epoch == 0) == (name == "scheduler.pt")


@pytest.mark.parametrize("kind", ["fifo", "link", "directory"])
@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "trainer_state.json"])
def test_non_regular_file_is_skipped_and_named(name: str, kind: str, of_transformers: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    shutil.copytree(of_transformers, theirs)
    put(theirs / name, kind)
    job = ImportingJob(tmp_path / "run", tiny_llama(2))
    with captured_logs() as lines:
        job.load(theirs)
    (message,) = [line for line in lines if line.startswith("Imported")]
    assert f"{theirs / name} is damaged: it is a" in message


@pytest.mark.parametrize("name", ["optimizer_state.pt", "scheduler_state.pt", "trainer_state.pt"])
def test_code_in_unversioned_forgather_files_does_not_run(name: str, tmp_path: Path) -> None:
    theirs, marker = tmp_path / "theirs", tmp_path / "marker"
    save_unversioned(theirs, TokenModel(1), {})
    (theirs / name).write_bytes(archived(marker))
    with captured_logs() as lines:
        ImportingJob(tmp_path / "run", TokenModel()).load(theirs)
    assert not marker.exists()
    assert any(f"{theirs / name} was rejected" in line for line in lines)


def test_scheduler_attributes_are_not_set_by_a_file(of_transformers: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    shutil.copytree(of_transformers, theirs)
    state = torch.load(theirs / "scheduler.pt", weights_only=True)
    torch.save({**state, "step": 1, "optimizer": 2}, theirs / "scheduler.pt")
    job = ImportingJob(tmp_path / "run", tiny_llama(2))
    with captured_logs() as lines:
        job.load(theirs)
    assert job.scheduler.optimizer is job.optimizer and callable(job.scheduler.step)
    assert any("'optimizer' belongs to a different kind of scheduler" in line for line in lines)


# --- weights: an error that names the file


@pytest.mark.parametrize("write", [archived, legacy, bare], ids=lambda value: value.__name__)
def test_weights_with_code_are_an_error(write: Callable[[Path], bytes], tmp_path: Path) -> None:
    theirs, marker = tmp_path / "theirs", tmp_path / "marker"
    save_unversioned(theirs, TokenModel(1), {}, safetensors=False)
    (theirs / "pytorch_model.bin").write_bytes(write(marker))
    job = ImportingJob(tmp_path / "run", TokenModel())
    before = weights(job.model)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin was rejected"):
        job.load(theirs)
    assert not marker.exists()
    assert all(torch.equal(tensor, before[name]) for name, tensor in job.model.state_dict().items())


@pytest.mark.parametrize("kind", ["fifo", "link", "directory"])
def test_weights_must_be_a_regular_file(kind: str, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs" / "checkpoint"
    save_unversioned(theirs, TokenModel(1), {})
    put(theirs / "model.safetensors", kind)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged: it is a"):
        ImportingJob(tmp_path / "run", TokenModel()).load(theirs)


def test_index_path_outside_the_directory_is_an_error(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    save_unversioned(theirs, TokenModel(1), {})
    shutil.move(theirs / "model.safetensors", tmp_path / "model.safetensors")
    (theirs / "model.safetensors.index.json").write_text('{"weight_map": {"head.weight": "../model.safetensors"}}')
    with pytest.raises(CheckpointLoadError, match=r"index\.json is not an index of weights"):
        ImportingJob(tmp_path / "run", TokenModel()).load(theirs)


# --- torch.distributed.checkpoint


def dcp_directory(folder: Path) -> Metadata:
    save_with_dcp(folder, {"model": TokenModel(1).state_dict(), "step": 3})
    return FileSystemReader(str(folder)).read_metadata()


def rewrite(folder: Path, metadata: Any) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def refused(folder: Path, tmp_path: Path, match: str) -> None:
    job = ImportingJob(tmp_path / "run", TokenModel())
    before, theirs = weights(job.model), content_of(folder)
    with pytest.raises(CheckpointError, match=match):
        job.load(folder)
    assert all(torch.equal(tensor, before[name]) for name, tensor in job.model.state_dict().items())
    assert content_of(folder) == theirs


def test_dcp_metadata_with_code_is_rejected(tmp_path: Path) -> None:
    theirs, marker = tmp_path / "theirs", tmp_path / "marker"
    metadata = dcp_directory(theirs)
    for bomb in (Bomb(marker), [metadata, Bomb(marker)]):
        rewrite(theirs, bomb)
        refused(theirs, tmp_path, r"\.metadata was rejected: .*(system|a list)")
    metadata.state_dict_metadata["model.head.weight"] = Bomb(marker)  # type: ignore[assignment]
    rewrite(theirs, metadata)
    refused(theirs, tmp_path, "tensors of the model are not in the checkpoint: head.weight")
    metadata = dcp_directory(tmp_path / "again")
    metadata.state_dict_metadata["model.head.weight"].properties = Bomb(marker)  # type: ignore[union-attr]
    rewrite(tmp_path / "again", metadata)
    refused(tmp_path / "again", tmp_path, "'model.head.weight' has an invalid description: its dtype is unknown")
    assert not marker.exists()


def test_pickle_opcodes_that_change_classes_are_rejected(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    dcp_directory(theirs)
    # BUILD on a class would set its attributes.
    (theirs / ".metadata").write_bytes(b"\x80\x04cbuiltins\nobject\n}\x8c\x01a\x8c\x01bsb.")
    refused(theirs, tmp_path, r"\.metadata was rejected.*sets the state of a PickledGlobal")
    for data in (b"", b"\x80\x04.", b"(" * 100, b"\x80\x04\x8c\xffabc", b"\x80\x02(lp0\n(i__builtin__\neval\n."):
        (theirs / ".metadata").write_bytes(data)
        refused(theirs, tmp_path, r"\.metadata was rejected")


def test_dcp_metadata_memory_bomb_is_rejected(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    dcp_directory(theirs)
    (theirs / ".metadata").write_bytes(b"\x80\x04(" + b"}" * 3_000_000 + b"t.")
    refused(theirs, tmp_path, r"\.metadata was rejected.*memory")


def change_of(name: str, metadata: Metadata) -> None:
    """Corrupt the chunks of a tensor, or the location of a chunk."""
    tensor: Any = metadata.state_dict_metadata["model.head.weight"]
    index = next(key for key in metadata.storage_data if key.fqn == "model.head.weight")
    stored = metadata.storage_data[index]
    if name == "hole":
        tensor.chunks[0].sizes = torch.Size([16, 8])
    elif name == "beyond":
        tensor.chunks[0].sizes = torch.Size([64, 8])
    elif name == "huge":
        tensor.size = tensor.chunks[0].sizes = torch.Size([2**50, 2**10])
    elif name == "negative":
        tensor.chunks[0].offsets = torch.Size([-1, 0])
    elif name == "no file":
        del metadata.storage_data[index]
    elif name == "outside":
        stored.relative_path = "../__0_0.distcp"
    elif name == "absolute":
        stored.relative_path = "/etc/passwd"
    elif name == "compressed":
        stored.transform_descriptors = ["stream.zstd"]
    elif name == "past the end":
        stored.offset = 10**9
    elif name == "other bytes":
        stored.offset += 64
    else:
        other = next(key for key in metadata.storage_data if key.fqn == "model.embedding.weight")
        metadata.storage_data[index] = metadata.storage_data[other]
        tensor.size = tensor.chunks[0].sizes = torch.Size([8, 32])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("hole", "do not cover axis 0"),
        ("beyond", "do not cover axis 0"),
        ("huge", "has shape"),
        ("negative", "a length or position"),
        ("no file", "no file has its chunk"),
        ("outside", "its file has a path that"),
        ("absolute", "its file has a path that"),
        ("compressed", "it is compressed"),
        ("past the end", r"distcp was rejected at byte 1,000,000,000: it is shorter"),
        ("other bytes", r"distcp was rejected at byte"),
        ("other tensor", "has shape"),
    ],
)
def test_inconsistent_dcp_metadata_is_rejected(name: str, reason: str, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    metadata = dcp_directory(theirs)
    change_of(name, metadata)
    rewrite(theirs, metadata)
    job = ImportingJob(tmp_path / "run", TokenModel())
    with pytest.raises(CheckpointError, match=reason):
        job.load(theirs)


@pytest.mark.parametrize("kind", ["fifo", "link", "directory"])
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_non_regular_dcp_files_are_rejected(name: str, kind: str, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs" / "checkpoint"
    dcp_directory(theirs)
    put(theirs / name, kind)
    with pytest.raises(CheckpointError, match=rf"{name} is damaged: it is a"):
        ImportingJob(tmp_path / "run", TokenModel()).load(theirs)


def test_dcp_chunk_with_code_is_rejected(tmp_path: Path) -> None:
    theirs, marker = tmp_path / "theirs", tmp_path / "marker"
    metadata = dcp_directory(theirs)
    bomb = archived(marker)
    for stored in metadata.storage_data.values():
        stored.offset, stored.length = 0, len(bomb)
    (theirs / "__0_0.distcp").write_bytes(bomb)
    rewrite(theirs, metadata)
    refused(theirs, tmp_path, r"__0_0\.distcp was rejected at byte 0: .*never code")
    assert not marker.exists()
