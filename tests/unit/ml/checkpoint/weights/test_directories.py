"""Checkpoint and model directories: validity, newest checkpoint, deletion, and `from_pretrained` symlinks."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from forgather.ml import sharded_checkpoint
from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.components import SharingPattern, StateComponent
from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.checkpoint.manifest import MANIFEST_NAME
from forgather.ml.sharded_checkpoint import (
    create_pretrained_symlinks,
    find_latest_checkpoint,
    get_checkpoint_metadata,
    index_file_name,
    load_checkpoint,
    load_checkpoint_metrics,
    load_shard_index,
    load_sharded_checkpoint,
    make_shard_index,
    maybe_delete_oldest_checkpoint,
    next_checkpoint_path,
    save_checkpoint,
    save_checkpoint_metrics,
    save_shard_index,
    save_sharded_checkpoint,
    validate_checkpoint,
)
from tests.support.tiny_parallel import make_coordinator


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))


def save(output_dir: Path, step: int, module: nn.Module | None = None) -> str:
    component = StateComponent("model", module or model(), SharingPattern.GLOBAL)
    return make_coordinator(str(output_dir), [component]).save_checkpoint(checkpoint_id=step)


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def test_empty_output_directory_has_no_checkpoint(tmp_path: Path) -> None:
    assert next_checkpoint_path(str(tmp_path), 5) == str(tmp_path / "checkpoints" / "checkpoint-5")
    assert find_latest_checkpoint(str(tmp_path)) is None
    assert maybe_delete_oldest_checkpoint(str(tmp_path), 1) == []
    assert not validate_checkpoint(str(tmp_path))


def test_metrics_are_saved_next_to_the_weights(tmp_path: Path) -> None:
    assert load_checkpoint_metrics(str(tmp_path)) is None
    save_checkpoint_metrics(str(tmp_path), {"eval_loss": torch.tensor(0.5), "epoch": 1})
    assert load_checkpoint_metrics(str(tmp_path)) == {"eval_loss": 0.5, "epoch": 1}


def test_saving_metrics_creates_the_directory_and_keeps_checkpoint_valid(tmp_path: Path) -> None:
    path = save_checkpoint_metrics(str(tmp_path / "new" / "checkpoint-1"), {"loss": 1.0})
    assert json.loads(Path(path).read_text()) == {"loss": 1.0}
    saved = save(tmp_path, 2)
    save_checkpoint_metrics(saved, {"loss": 2.0})
    assert store.verify_checkpoint(saved) == []
    Path(saved, "eval_metrics.json").write_text('{"loss": 3.0, "measured": "again"}')
    assert store.verify_checkpoint(saved) == [] and validate_checkpoint(saved)
    assert load_checkpoint_metrics(saved) == {"loss": 3.0, "measured": "again"}


class TestDirectoriesWithoutManifest:
    def test_weights_make_a_directory_valid(self, tmp_path: Path) -> None:
        save_checkpoint(str(tmp_path), model(), max_shard_size=60)
        assert validate_checkpoint(str(tmp_path))
        (tmp_path / "model-00002-of-00004.safetensors").unlink()
        assert not validate_checkpoint(str(tmp_path))

    def test_damaged_checkpoint_is_not_valid(self, tmp_path: Path) -> None:
        path = Path(save(tmp_path, 1))
        (path / MANIFEST_NAME).write_text("{}")
        assert not validate_checkpoint(str(path))
        (path / MANIFEST_NAME).unlink()
        assert validate_checkpoint(str(path)), "the weights alone are valid"

    def test_manifest_without_version_and_checksum_is_foreign(self, tmp_path: Path) -> None:
        save_checkpoint(str(tmp_path), model())
        manifest = {"checkpoint_path": "x", "world_size": 1, "timestamp": "2026-01-01T00:00:00", "components": {}}
        (tmp_path / MANIFEST_NAME).write_text(json.dumps(manifest))
        other = model(1)
        load_checkpoint(str(tmp_path), other)
        assert torch.equal(other[0].weight, model()[0].weight)
        assert validate_checkpoint(str(tmp_path))

    def test_directory_without_manifest_can_be_the_newest(self, tmp_path: Path) -> None:
        first = save(tmp_path, 10)
        assert find_latest_checkpoint(str(tmp_path)) == first
        plain = tmp_path / "checkpoints" / "checkpoint-20"
        save_checkpoint(str(plain), model())
        assert find_latest_checkpoint(str(tmp_path)) == str(plain)
        (tmp_path / "checkpoints" / "checkpoint-30").mkdir()
        assert find_latest_checkpoint(str(tmp_path)) == str(plain)


def test_checkpoint_metadata_fields(tmp_path: Path) -> None:
    path = save(tmp_path, 7)
    save_checkpoint_metrics(path, {"loss": 0.5})
    found = get_checkpoint_metadata(path)
    assert (found["step"], found["world_size"], found["components"]) == (7, 1, ["model"])
    assert found["is_complete"] and found["has_manifest"] and found["metrics"] == {"loss": 0.5}
    assert found["weight_files"] == ["model.safetensors"]
    assert found["timestamp"] == store.open_checkpoint(path).manifest.written_at.timestamp()
    plain = tmp_path / "plain"
    save_checkpoint(str(plain), model(), safetensors=False)
    found = get_checkpoint_metadata(str(plain))
    assert (found["step"], found["world_size"], found["components"]) == (None, None, [])
    assert found["is_complete"] and not found["has_manifest"] and found["weight_files"] == ["pytorch_model.bin"]
    with pytest.raises(CheckpointLoadError, match="no such directory"):
        get_checkpoint_metadata(str(tmp_path / "nowhere"))


class TestDeletion:
    def test_oldest_are_deleted_and_preserved_checkpoints_stay(self, tmp_path: Path) -> None:
        paths = [save(tmp_path, step) for step in (1, 2, 3, 4, 5)]
        deleted = maybe_delete_oldest_checkpoint(
            str(tmp_path), 2, preserved_checkpoints=[paths[0]], best_checkpoint=paths[1]
        )
        assert deleted == [paths[2]]
        assert names(tmp_path / "checkpoints") == [f"checkpoint-{step}" for step in (1, 2, 4, 5)]
        assert maybe_delete_oldest_checkpoint(str(tmp_path), None) == []

    def test_directory_without_manifest_is_never_deleted(self, tmp_path: Path) -> None:
        save_checkpoint(str(tmp_path / "checkpoints" / "checkpoint-1"), model())
        paths = [save(tmp_path, step) for step in (2, 3)]
        assert maybe_delete_oldest_checkpoint(str(tmp_path), 1) == paths[:1]
        assert names(tmp_path / "checkpoints") == ["checkpoint-1", "checkpoint-3"]


class TestLinks:
    def test_model_directory_links_to_checkpoint_weights(self, tmp_path: Path) -> None:
        paths = [save(tmp_path, step, model(step)) for step in (1, 2)]
        for path, seed in ((None, 2), (paths[0], 1)):
            assert create_pretrained_symlinks(str(tmp_path), path) == [str(tmp_path / "model.safetensors")]
            assert not os.path.isabs(os.readlink(tmp_path / "model.safetensors"))
            loaded = model(99)
            load_checkpoint(str(tmp_path), loaded)
            assert torch.equal(loaded[0].weight, model(seed)[0].weight)
        moved = Path(shutil.move(tmp_path, tmp_path.with_name(f"{tmp_path.name}-moved")))
        assert load_checkpoint(str(moved)) is not None

    def test_symlinks_of_another_shard_count_are_replaced(self, tmp_path: Path) -> None:
        for name, size in (("sharded", 60), ("single", 2**32)):
            save_checkpoint(str(tmp_path / name), model(), max_shard_size=size)
            create_pretrained_symlinks(str(tmp_path), str(tmp_path / name))
            assert load_checkpoint(str(tmp_path), model(1)) is None
        assert [name for name in names(tmp_path) if name.startswith("model")] == ["model.safetensors"]

    def test_real_weights_are_never_replaced(self, tmp_path: Path) -> None:
        path = save(tmp_path, 1)
        save_checkpoint(str(tmp_path), model(5))
        with pytest.raises(FileExistsError, match=r"model\.safetensors"):
            create_pretrained_symlinks(str(tmp_path), path)
        assert not (tmp_path / "model.safetensors").is_symlink()

    def test_symlinks_need_existing_weights(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointLoadError, match="no checkpoint"):
            create_pretrained_symlinks(str(tmp_path))
        with pytest.raises(CheckpointLoadError, match="no weight files"):
            create_pretrained_symlinks(str(tmp_path), str(tmp_path))


class TestShards:
    @pytest.mark.parametrize("safetensors", [True, False])
    def test_stages_write_shards_and_an_index(self, tmp_path: Path, safetensors: bool) -> None:
        whole = model()
        stages = [nn.ModuleDict({"0": whole[0]}), nn.ModuleDict({"1": whole[1]})]
        index = make_shard_index([stage.state_dict() for stage in stages], safetensors=safetensors)
        folder = str(tmp_path / "new")
        written = [save_sharded_checkpoint(folder, index, stage, safetensors=safetensors) for stage in stages]
        assert sorted(file for files in written for file in files) == sorted(set(index["weight_map"].values()))
        path = save_shard_index(index, folder, index_file_name(safetensors))
        assert path == os.path.join(folder, index_file_name(safetensors)) == save_shard_index(index, folder)
        assert load_shard_index(folder) == load_shard_index(path) == index
        loaded = load_sharded_checkpoint(folder, safetensors=safetensors)
        assert loaded is not None and all(torch.equal(loaded[name], one) for name, one in whole.state_dict().items())
        assert load_sharded_checkpoint(folder, keys=["1.bias"]) is not None
        stage = nn.ModuleDict({"1": nn.Linear(4, 5)})
        load_sharded_checkpoint(folder, stage)
        assert torch.equal(stage["1"].weight, whole[1].weight)
        with pytest.raises(CheckpointLoadError, match="not in the checkpoint: 7"):
            load_sharded_checkpoint(folder, nn.ModuleDict({"7": nn.Linear(4, 5)}))
        with torch.device("meta"):
            empty = model()
        load_sharded_checkpoint(folder, empty, assign=True)
        assert torch.equal(empty[1].weight, whole[1].weight)

    def test_weight_format_can_be_chosen_when_both_exist(self, tmp_path: Path) -> None:
        for safetensors, seed in ((True, 0), (False, 1)):
            save_checkpoint(str(tmp_path / str(seed)), model(seed), safetensors=safetensors)
            shutil.copytree(tmp_path / str(seed), tmp_path / "both", dirs_exist_ok=True)
        for safetensors, seed in ((None, 0), (True, 0), (False, 1)):
            loaded = load_sharded_checkpoint(str(tmp_path / "both"), safetensors=safetensors)
            assert loaded is not None and torch.equal(loaded["0.weight"], model(seed)[0].weight)
        with pytest.raises(CheckpointLoadError, match=r"no weight files.*pytorch_model\*\.bin"):
            load_sharded_checkpoint(str(tmp_path / "0"), safetensors=False)

    def test_index_of_the_other_format_is_rejected(self, tmp_path: Path) -> None:
        index = make_shard_index([model().state_dict()])
        with pytest.raises(ValueError, match=r"pytorch_model\.bin.*make_shard_index\(\.\.\., safetensors=True\)"):
            save_sharded_checkpoint(str(tmp_path), index, model(), safetensors=True)

    def test_single_weight_file_has_no_index(self, tmp_path: Path) -> None:
        save_checkpoint(str(tmp_path), model())
        with pytest.raises(CheckpointLoadError, match="no index"):
            load_shard_index(str(tmp_path))

    def test_state_dict_is_saved_like_a_module(self, tmp_path: Path) -> None:
        tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        tied[1].weight = tied[0].weight
        for name, what in (("module", tied), ("state", tied.state_dict())):
            save_checkpoint(str(tmp_path / name), what)
        files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("module", "state")]
        assert files[0] == files[1]


def test_facade_exports_every_name() -> None:
    constants = {"WEIGHTS_NAME", "WEIGHTS_INDEX_NAME", "SAFE_WEIGHTS_NAME", "SAFE_WEIGHTS_INDEX_NAME"}
    assert constants <= set(sharded_checkpoint.__all__)
    assert [name for name in sharded_checkpoint.__all__ if not hasattr(sharded_checkpoint, name)] == []
    assert index_file_name(True) == sharded_checkpoint.SAFE_WEIGHTS_INDEX_NAME
    assert index_file_name(False) == sharded_checkpoint.WEIGHTS_INDEX_NAME
