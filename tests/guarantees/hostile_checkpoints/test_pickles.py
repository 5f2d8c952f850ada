"""Pickle bombs: state files with code are rejected and the code never runs, even with matching checksums."""

import io
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.errors import CheckpointCorruptError, CheckpointError
from forgather.ml.checkpoint.files.state_files import read_state, verify_file
from forgather.ml.checkpoint.manifest import MANIFEST_NAME, CheckpointManifest
from forgather.ml.checkpoint.weights.module_weights import load_checkpoint
from tests.support.faults.hostile import seal, with_pickle
from tests.support.faults.job import Job

STATE_FILES = [
    "optimizer_state.pt",
    "trainer_state.pt",
    "node_state_node_0.pt",
    "group_state_group_everyone_0.pt",
    "dataset_state_rank_0.pt",
    "notes_state_rank_0.pt",
    "rng_state_rank_0.pt",
]
SHARDS = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
SINGLE = ["pytorch_model.bin"]


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self._marker}",)


def archived(marker: Path) -> bytes:
    """Return a bomb in torch's current archive format."""
    buffer = io.BytesIO()
    torch.save({"state": torch.zeros(3), "bomb": Bomb(marker)}, buffer)
    return buffer.getvalue()


def legacy(marker: Path) -> bytes:
    """Return a bomb in torch's legacy format, a sequence of pickles."""
    buffer = io.BytesIO()
    torch.save({"state": torch.zeros(3), "bomb": Bomb(marker)}, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def plain_pickle(marker: Path) -> bytes:
    return pickle.dumps(Bomb(marker))


def exchanged_pickle(marker: Path) -> bytes:
    """Return a torch archive with a hand-written pickle."""
    return with_pickle(pickle.dumps(Bomb(marker), protocol=2))


def broken_pickle(marker: Path) -> bytes:
    """Return an archive with a pickle that is invalid after the bomb."""
    return with_pickle(pickle.dumps(Bomb(marker), protocol=2)[:-1] + b"\xff\xff\xff")


FORMATS = [archived, legacy, plain_pickle, exchanged_pickle, broken_pickle]


def test_bombs_run_with_weights_only_false(tmp_path: Path) -> None:
    for number, make in enumerate((archived, legacy, exchanged_pickle)):
        torch.load(io.BytesIO(make(tmp_path / str(number))), weights_only=False)
        assert (tmp_path / str(number)).exists(), make.__name__


def trained(output_dir: Path, **options: Any) -> Path:
    job = Job(output_dir, **options)
    for _ in range(2):
        job.train()
        job.save()
    job.manager.close()
    return output_dir


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Output directories with two checkpoints, by weight format."""
    return {
        "safetensors": trained(tmp_path_factory.mktemp("safetensors")),
        "shards": trained(tmp_path_factory.mktemp("shards"), save_safetensors=False),
        "single": trained(tmp_path_factory.mktemp("single"), save_safetensors=False, max_shard_size=2**30),
    }


OPTIONS: dict[str, dict[str, Any]] = {
    "safetensors": {},
    "shards": {"save_safetensors": False},
    "single": {"save_safetensors": False, "max_shard_size": 2**30},
}
TARGETS = [
    *(("safetensors", name) for name in STATE_FILES),
    *(("shards", name) for name in SHARDS),
    *(("single", name) for name in SINGLE),
]


@pytest.mark.parametrize("make", FORMATS)
@pytest.mark.parametrize(("weights", "name"), TARGETS)
def test_pickle_bomb_is_rejected(
    weights: str, name: str, make: Callable[[Path], bytes], pristine: dict[str, Path], tmp_path: Path
) -> None:
    output_dir = Path(shutil.copytree(pristine[weights], tmp_path / "output"))
    newest = output_dir / "checkpoints" / "checkpoint-2"
    marker = tmp_path / "marker"
    (newest / name).write_bytes(make(marker))

    with pytest.raises(CheckpointCorruptError, match=name):
        resume(output_dir, newest, weights)
    assert resume(output_dir, None, weights).endswith("checkpoint-1")
    assert not marker.exists()

    seal(newest, name)
    record = next(one for one in CheckpointManifest.load(str(newest / MANIFEST_NAME)).files if one.path == name)
    verify_file(str(newest), record)  # The attacker's checkpoint is consistent.
    assert [f"{name} was rejected" in problem for problem in store.verify_checkpoint(str(newest))] == [True]
    with pytest.raises(CheckpointError, match=f"{name} was rejected") as refusal:
        resume(output_dir, newest, weights)
    assert "likely succeed" not in str(refusal.value), "torch's advice to execute the file"
    assert resume(output_dir, None, weights).endswith("checkpoint-1")
    assert not marker.exists()


def resume(output_dir: Path, path: Path | None, weights: str) -> str:
    job = Job(output_dir, seed=99, **OPTIONS[weights])
    before = job.digest()
    try:
        return str(job.manager.load_checkpoint(None if path is None else str(path)))
    except CheckpointError:
        # Weights are loaded in place, after all state files. State files are read before anything changes.
        assert job.digest() == before or weights != "safetensors", "a rejected state file changed something"
        raise
    finally:
        job.manager.close()


@pytest.mark.parametrize("make", FORMATS)
def test_pickle_bomb_without_a_manifest_is_rejected(make: Callable[[Path], bytes], tmp_path: Path) -> None:
    """Helpers that read any directory of weights have no manifest to check against."""
    marker = tmp_path / "marker"
    (tmp_path / "pytorch_model.bin").write_bytes(make(marker))
    with pytest.raises(CheckpointError, match="rejected"):
        load_checkpoint(str(tmp_path))
    with pytest.raises(CheckpointError, match="rejected"):
        read_state(str(tmp_path / "pytorch_model.bin"))
    assert not marker.exists()
