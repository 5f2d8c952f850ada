"""Model weights through the coordinator: dtypes, file formats, shards, and models that do not fit."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from forgather.ml.checkpoint.components import SharingPattern, StateComponent
from forgather.ml.checkpoint.coordinator import (
    CheckpointLoadError,
)
from forgather.ml.checkpoint.manifest import read_manifest
from forgather.ml.checkpoint.weights.module_weights import make_shard_index
from tests.support.ranks import run_on_ranks
from tests.support.tiny_parallel import (
    Outcome,
    entries,
    file_names,
    make_coordinator,
    raised,
)

GLOBAL, PER_RANK, REPLICATED = SharingPattern.GLOBAL, SharingPattern.PER_RANK, SharingPattern.REPLICATED


class Mixed(nn.Module):
    """Weights and buffers of many kinds; `step_scale` is not part of the state."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(4, 3, bias=False, dtype=torch.bfloat16)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("quantised", torch.randn(5).to(torch.float8_e4m3fn))
        self.register_buffer("flags", torch.randn(3) > 0)
        self.register_buffer("counts", torch.randint(0, 1000, (2, 2)))
        self.register_buffer("bytes", torch.randint(0, 200, (3,), dtype=torch.uint8))
        self.register_buffer("transposed", torch.randn(3, 2).t())
        self.register_buffer("scalar", torch.randn(()))
        self.register_buffer("nothing", torch.empty(0, 4))
        self.register_buffer("step_scale", torch.randn(1), persistent=False)
        for _ in range(seed % 3 + 1):
            self.norm(torch.randn(8, 3))


def bits(state: dict[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {
        name: (str(value.dtype), tuple(value.shape), value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        for name, value in state.items()
    }


def round_trip_model(output_dir: str, pattern: SharingPattern, save_safetensors: bool) -> tuple[str, bool, bool]:
    model = Mixed(seed=1)
    component = StateComponent("model", model, pattern)
    path = make_coordinator(output_dir, [component], save_safetensors=save_safetensors).save_checkpoint(checkpoint_id=1)
    other = Mixed(seed=2 + dist.get_rank())
    unsaved = other.get_buffer("step_scale").clone()
    make_coordinator(output_dir, [StateComponent("model", other, pattern)]).load_checkpoint()
    return (
        path,
        bits(other.state_dict()) == bits(model.state_dict()),
        torch.equal(other.get_buffer("step_scale"), unsaved),
    )


@pytest.mark.parametrize(
    ("save_safetensors", "file"),
    [(True, "model.safetensors"), (False, "pytorch_model.bin")],
    ids=["safetensors", "bin"],
)
@pytest.mark.parametrize("pattern", [GLOBAL, REPLICATED], ids=lambda pattern: pattern.value)
def test_weights_of_every_kind_round_trip_bit_exactly(
    tmp_path: Path, pattern: SharingPattern, save_safetensors: bool, file: str
) -> None:
    results = run_on_ranks(round_trip_model, 2, str(tmp_path), pattern, save_safetensors)
    path = results[0][0]
    assert results == [(path, True, True)] * 2
    assert file_names(path) == {file}


def parts_of(seed: int) -> list[nn.ModuleDict]:
    torch.manual_seed(seed)
    layers = {str(number): nn.Linear(4, 4) for number in range(4)}
    return [nn.ModuleDict({name: layers[name] for name in names}) for names in (("0", "1"), ("2", "3"))]


def round_trip_shards(output_dir: str, save_safetensors: bool, index_safetensors: bool) -> tuple[str, bool]:
    parts = parts_of(1)
    own = parts[dist.get_rank()]
    # A matrix of 64 bytes fills a shard, and so do four bias vectors.
    index = make_shard_index(
        [part.state_dict() for part in parts], safetensors=index_safetensors, max_shard_size=64, metadata={"note": "x"}
    )
    component = StateComponent("model", own, PER_RANK)
    options: dict[str, Any] = {"save_safetensors": save_safetensors, "model_parts": [own], "shard_index": index}
    path = make_coordinator(output_dir, [component], **options).save_checkpoint(checkpoint_id=1)
    loaded = parts_of(2)[dist.get_rank()]
    make_coordinator(output_dir, [StateComponent("model", loaded, PER_RANK)], model_parts=[loaded]).load_checkpoint()
    return path, bits(loaded.state_dict()) == bits(own.state_dict())


@pytest.mark.parametrize("index_safetensors", [True, False], ids=["index of safetensors", "index of bin"])
@pytest.mark.parametrize("save_safetensors", [True, False], ids=["safetensors", "bin"])
def test_rank_writes_several_shards_and_reads_its_own_tensors(
    tmp_path: Path, save_safetensors: bool, index_safetensors: bool
) -> None:
    """The requested file format wins over the format of the shard index."""
    results = run_on_ranks(round_trip_shards, 2, str(tmp_path), save_safetensors, index_safetensors)
    path = results[0][0]
    assert [equal for _, equal in results] == [True, True]
    writers: dict[int, int] = {}
    for record in read_manifest(path).component_files("model"):
        if "-of-" in record.path:
            writers[record.writer_rank] = writers.get(record.writer_rank, 0) + 1
    assert writers == {0: 4, 1: 4}
    stem, ending = ("model", "safetensors") if save_safetensors else ("pytorch_model", "bin")
    shards = {f"{stem}-{number:05d}-of-00008.{ending}" for number in range(1, 9)}
    assert file_names(path) == shards | {f"{stem}.{ending}.index.json"}


def save_with_stale_index(output_dir: str) -> Outcome:
    parts = parts_of(1)
    index = make_shard_index([part["2" if number else "0"].state_dict() for number, part in enumerate(parts)])
    own = parts[dist.get_rank()]
    coordinator = make_coordinator(
        output_dir, [StateComponent("model", own, PER_RANK)], model_parts=[own], shard_index=index
    )
    return raised(lambda: coordinator.save_checkpoint(checkpoint_id=1))


def test_shard_index_without_all_tensors_is_rejected(tmp_path: Path) -> None:
    first, second = run_on_ranks(save_with_stale_index, 2, str(tmp_path))
    assert first == second
    assert first[0] == "CheckpointSaveError"
    assert "shard index has no file for 8 tensors" in first[1]
    assert entries(tmp_path / "checkpoints") == []


def test_strict_load_rejects_a_model_that_does_not_fit(tmp_path: Path) -> None:
    saved = nn.ModuleDict({"kept": nn.Linear(2, 2), "dropped": nn.Linear(2, 2)})
    path = make_coordinator(str(tmp_path), [StateComponent("model", saved, GLOBAL)]).save_checkpoint(checkpoint_id=1)
    model = nn.ModuleDict({"kept": nn.Linear(2, 2), "added": nn.Linear(2, 2)})
    before = bits(model.state_dict())
    coordinator = make_coordinator(str(tmp_path), [StateComponent("model", model, GLOBAL)])
    with pytest.raises(CheckpointLoadError, match=r"added\.weight.*dropped\.weight.*strict=False"):
        coordinator.load_checkpoint(path)
    assert bits(model.state_dict()) == before, "a rejected load changes nothing"
    coordinator.load_checkpoint(path, strict=False)
    assert torch.equal(model.get_parameter("kept.weight"), saved.get_parameter("kept.weight"))
    assert bits(model["added"].state_dict()) == {
        name.removeprefix("added."): value for name, value in before.items() if name.startswith("added.")
    }


def test_weights_of_another_shape_are_rejected_with_both_shapes(tmp_path: Path) -> None:
    make_coordinator(str(tmp_path), [StateComponent("model", nn.Linear(2, 2), GLOBAL)]).save_checkpoint(checkpoint_id=1)
    coordinator = make_coordinator(str(tmp_path), [StateComponent("model", nn.Linear(3, 2), GLOBAL)])
    for strict in (True, False):
        with pytest.raises(CheckpointLoadError, match=r"\(2, 2\) in the checkpoint, but \(2, 3\) in the model"):
            coordinator.load_checkpoint(strict=strict)
