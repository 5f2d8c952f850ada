"""Model export: new weights replace the old ones, and a complete model exists at every moment."""

import json
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from forgather.ml.checkpoint.errors import CheckpointSaveError
from forgather.ml.checkpoint.files import durable
from forgather.ml.checkpoint.files.hashed_io import HashingWriter
from forgather.ml.checkpoint.store import new_attempt
from forgather.ml.checkpoint.weights.export import ModelExport, remove_unfinished_exports
from forgather.ml.checkpoint.weights.module_weights import write_weights

INDEX = "model.safetensors.index.json"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def prepare(output_dir: Path, *names: str) -> ModelExport:
    export = ModelExport(str(output_dir), new_attempt())
    export.begin(overwrite=True)
    for name in names:
        path = Path(export.temporary_path) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(SHARDS) if name == INDEX else name)
    return export


def install(output_dir: Path, *names: str) -> None:
    export = prepare(output_dir, *names)
    export.install()
    export.clean_up()


def is_whole(output_dir: Path) -> bool:
    """Return whether a reader finds a complete model: all shards of the index if it exists, else the single file."""
    if (output_dir / INDEX).exists():
        return all((output_dir / shard).exists() for shard in json.loads((output_dir / INDEX).read_text()))
    return (output_dir / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("before", "after"),
    [(["model.safetensors"], [*SHARDS, INDEX]), ([*SHARDS, INDEX], ["model.safetensors"])],
    ids=["single to shards", "shards to single"],
)
def test_complete_model_exists_at_every_moment(
    tmp_path: Path, before: list[str], after: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, *before)
    export = prepare(tmp_path, *after)
    seen = []

    def watched(operation: Callable[..., None], *paths: str) -> None:
        operation(*paths)
        seen.append(is_whole(tmp_path))

    for name in ("remove", "replace"):
        monkeypatch.setattr(os, name, partial(watched, getattr(os, name)))
    export.install()
    export.clean_up()
    assert len(seen) == 4 and all(seen)
    assert sorted(os.listdir(tmp_path)) == sorted(after)


def test_stale_files_are_removed_only_after_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, *SHARDS, INDEX)
    export = prepare(tmp_path, "model.safetensors", "templates/a.jinja")
    states = []

    def fsync_directory(path: str) -> None:
        states.append((os.path.basename(path), (tmp_path / "model.safetensors").exists(), (tmp_path / INDEX).exists()))

    monkeypatch.setattr(durable, "fsync_directory", fsync_directory)
    export.install()
    top = tmp_path.name
    assert states[-4:] == [(top, True, True), ("templates", True, True), (top, True, False), (top, True, False)]


def test_only_unfinished_exports_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in (".tmp-model-0123456789ab", ".tmp-model-0123456789ac", ".tmp-model-mine"):
        (tmp_path / name).mkdir()

    def remove_tree(path: str) -> None:
        if path.endswith("ab"):
            raise PermissionError(f"not {path}")
        real(path)

    real = durable.remove_tree
    monkeypatch.setattr(durable, "remove_tree", remove_tree)
    with caplog.at_level(logging.WARNING):
        remove_unfinished_exports(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == [".tmp-model-0123456789ab", ".tmp-model-mine"]
    assert "0123456789ab could not be removed" in caplog.text


# --- what was written is what was planned


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_weight_files_are_verified_by_tensor_names(tmp_path: Path, file: str) -> None:
    export = prepare(tmp_path)
    with HashingWriter(os.path.join(export.temporary_path, file)) as writer:
        write_weights(writer, {"a": torch.ones(2), "b": torch.zeros(1)}, [])
    export.verify({file: ["a", "b"]})
    with pytest.raises(CheckpointSaveError, match=rf"{file} was written without 1 of its tensors, such as c"):
        export.verify({file: ["a", "b", "c"]})


def test_missing_weight_file_is_detected(tmp_path: Path) -> None:
    export = prepare(tmp_path)
    with pytest.raises(CheckpointSaveError, match=rf"{SHARDS[1]} was written without 1 of its tensors, such as a"):
        export.verify({SHARDS[1]: ["a"]})
