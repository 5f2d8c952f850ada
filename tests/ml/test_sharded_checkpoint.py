"""Weight files: what is tied is stored once, shards follow their index, and other libraries read them."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from forgather.ml.checkpoint.errors import CheckpointCorruptError, CheckpointLoadError
from forgather.ml.sharded_checkpoint import (
    create_sharing_metadata,
    find_latest_checkpoint,
    get_all_fqns,
    id_to_fqn,
    load_checkpoint,
    load_checkpoint_metrics,
    load_sharded_checkpoint,
    make_shard_index,
    maybe_delete_oldest_checkpoint,
    next_checkpoint_path,
    retie_parameters,
    save_checkpoint,
    save_checkpoint_metrics,
    save_sharded_checkpoint,
    validate_checkpoint,
)

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.bool,
]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.arange(6).reshape(2, 3))
        self.register_buffer("scratch", torch.ones(2), persistent=False)


class EveryDtype(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for number, dtype in enumerate(DTYPES):
            values = torch.randint(0, 2, (3, number + 1), generator=generator).to(dtype)
            self.register_buffer(f"b{number}", values)
        self.register_buffer("scalar", torch.tensor(3.5))
        self.register_buffer("empty", torch.empty(0, 4))
        self.register_buffer("transposed", torch.randn(4, 6, generator=generator).t())


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(first: nn.Module, second: nn.Module) -> None:
    other = second.state_dict()
    for name, tensor in first.state_dict().items():
        assert (tensor.dtype, tensor.shape) == (other[name].dtype, other[name].shape), name
        assert bits(tensor) == bits(other[name]), name


@pytest.mark.parametrize("in_safetensors", [True, False])
@pytest.mark.parametrize("max_shard_size", [2**32, 300])
def test_a_module_round_trips(tmp_path: Path, in_safetensors: bool, max_shard_size: int) -> None:
    torch.manual_seed(0)
    model = Tied()
    save_checkpoint(str(tmp_path), model, safetensors=in_safetensors, max_shard_size=max_shard_size)
    torch.manual_seed(1)
    other = Tied()
    load_checkpoint(str(tmp_path), other)
    assert_same(model, other)
    assert other.head.weight is other.embedding.weight


@pytest.mark.parametrize("in_safetensors", [True, False])
def test_every_dtype_and_layout_round_trips(tmp_path: Path, in_safetensors: bool) -> None:
    model, other = EveryDtype(0), EveryDtype(1)
    save_checkpoint(str(tmp_path), model, safetensors=in_safetensors)
    load_checkpoint(str(tmp_path), other)
    assert_same(model, other)


def test_the_safetensors_library_reads_our_files_and_we_read_its(tmp_path: Path) -> None:
    model = EveryDtype(0)
    save_checkpoint(str(tmp_path / "ours"), model)
    theirs = safetensors.torch.load_file(tmp_path / "ours" / "model.safetensors")
    for name, tensor in model.state_dict().items():
        assert bits(theirs[name]) == bits(tensor), name
    (tmp_path / "theirs").mkdir()
    contiguous = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    safetensors.torch.save_file(contiguous, tmp_path / "theirs" / "model.safetensors")
    loaded = load_checkpoint(str(tmp_path / "theirs"))
    assert loaded is not None
    for name, tensor in model.state_dict().items():
        assert bits(loaded[name]) == bits(tensor), name


def test_tied_tensors_are_stored_once(tmp_path: Path) -> None:
    save_checkpoint(str(tmp_path), Tied())
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert "embedding.weight" in stored and "head.weight" not in stored and "scratch" not in stored


def test_tying_is_found_on_meta_and_made_again() -> None:
    with torch.device("meta"):
        model = Tied()
    sharing = create_sharing_metadata(model)
    assert sharing == [["embedding.weight", "head.weight"]]
    model.to_empty(device="cpu")
    model.head.weight = nn.Parameter(torch.zeros(11, 5))
    retie_parameters(model, sharing)
    assert model.head.weight is model.embedding.weight


def test_a_meta_module_is_filled_with_new_tensors(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tied()
    save_checkpoint(str(tmp_path), model)
    with torch.device("meta"):
        empty = Tied()
    load_checkpoint(str(tmp_path), empty, assign=True)
    assert_same(model, empty)
    assert empty.head.weight is empty.embedding.weight and empty.head.weight.requires_grad


def test_a_stage_reads_only_its_own_tensors(tmp_path: Path) -> None:
    """The head finds the tied tensor under the name that it is stored by."""
    torch.manual_seed(0)
    model = Tied()
    save_checkpoint(str(tmp_path), model)
    loaded = load_checkpoint(str(tmp_path), keys=["head.weight", "table"])
    assert loaded is not None and sorted(loaded) == ["head.weight", "table"]
    assert torch.equal(loaded["head.weight"], model.embedding.weight)
    with pytest.raises(CheckpointLoadError, match="no tensors named nonsense"):
        load_checkpoint(str(tmp_path), keys=["nonsense"])


def test_shards_never_mix_writers_and_respect_the_size() -> None:
    first = {f"a{i}": torch.empty(100, device="meta") for i in range(5)}
    second = {"b": torch.empty(1000, device="meta"), "a0": torch.empty(100, device="meta")}
    index = make_shard_index([first, second], safetensors=True, max_shard_size=1000)
    assert index["metadata"]["total_size"] == 6000
    files: dict[str, list[str]] = {}
    for name, file in index["weight_map"].items():
        files.setdefault(file, []).append(name)
    assert files == {
        "model-00001-of-00004.safetensors": ["a0", "a1"],
        "model-00002-of-00004.safetensors": ["a2", "a3"],
        "model-00003-of-00004.safetensors": ["a4"],
        "model-00004-of-00004.safetensors": ["b"],
    }
    names = set(make_shard_index([first, second], max_shard_size=1000)["weight_map"].values())
    assert "pytorch_model-00001-of-00004.bin" in names


def test_two_stages_write_one_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    stages = [nn.ModuleDict({"0": whole[0]}), nn.ModuleDict({"1": whole[1]})]
    index = make_shard_index([stage.state_dict() for stage in stages], safetensors=True)
    for stage in stages:
        save_sharded_checkpoint(str(tmp_path), index, stage)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    other = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    load_checkpoint(str(tmp_path), other)
    assert_same(whole, other)
    part = nn.ModuleDict({"1": nn.Linear(4, 5)})
    load_sharded_checkpoint(str(tmp_path), index, part)
    assert torch.equal(part["1"].weight, whole[1].weight)


def test_names_and_shapes_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    save_checkpoint(str(tmp_path), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)))
    with pytest.raises(CheckpointLoadError, match=r"1\.weight.*\(5, 4\) in the checkpoint, but \(6, 4\)"):
        load_checkpoint(str(tmp_path), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 6)))
    larger = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 1))
    with pytest.raises(CheckpointLoadError, match=r"2 tensors of the model are not in the checkpoint: 2\.weight"):
        load_checkpoint(str(tmp_path), larger)
    load_checkpoint(str(tmp_path), larger, strict=False)
    with pytest.raises(CheckpointLoadError, match=r"2 tensors of the checkpoint are not in the model: 1\."):
        load_checkpoint(str(tmp_path), nn.Sequential(nn.Linear(3, 4)))
    with pytest.raises(CheckpointLoadError, match="no weight files"):
        load_checkpoint(str(tmp_path / "nowhere"), larger)


def test_a_header_that_lies_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for data in (b"", b"short", (2**60).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"[]"):
        path.write_bytes(data)
        with pytest.raises(CheckpointCorruptError, match="damaged"):
            load_checkpoint(str(tmp_path))


def test_values_are_converted_to_the_dtype_of_the_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    save_checkpoint(str(tmp_path), model)
    half = nn.Linear(3, 4, dtype=torch.bfloat16)
    load_checkpoint(str(tmp_path), half)
    assert torch.equal(half.weight, model.weight.to(torch.bfloat16))


def test_modules_that_hand_out_copies_are_loaded_through_their_own_method(tmp_path: Path) -> None:
    class Doubled(nn.Linear):
        def _save_to_state_dict(self, destination, prefix, keep_vars):  # type: ignore[no-untyped-def]
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "weight"] = destination[prefix + "weight"] * 2

        def _load_from_state_dict(self, state_dict, prefix, *args):  # type: ignore[no-untyped-def]
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"] / 2
            super()._load_from_state_dict(state_dict, prefix, *args)

    torch.manual_seed(0)
    model, other = Doubled(3, 4), Doubled(3, 4)
    save_checkpoint(str(tmp_path), model)
    load_checkpoint(str(tmp_path), other)
    assert_same(model, other)
    assert torch.equal(model.weight, other.weight)


def test_names_of_tensors() -> None:
    model = Tied()
    assert id_to_fqn(model)[id(model.head.weight)] == ["embedding.weight", "head.weight"]
    assert "head.weight" in get_all_fqns(model) and "scratch" not in get_all_fqns(model)


def test_checkpoint_directories(tmp_path: Path) -> None:
    assert next_checkpoint_path(str(tmp_path), 5) == str(tmp_path / "checkpoints" / "checkpoint-5")
    assert find_latest_checkpoint(str(tmp_path)) is None
    assert maybe_delete_oldest_checkpoint(str(tmp_path), 1) == []
    assert not validate_checkpoint(str(tmp_path))


def test_metrics_are_kept_beside_the_weights(tmp_path: Path) -> None:
    assert load_checkpoint_metrics(str(tmp_path)) is None
    save_checkpoint_metrics(str(tmp_path), {"eval_loss": torch.tensor(0.5), "epoch": 1})
    assert load_checkpoint_metrics(str(tmp_path)) == {"eval_loss": 0.5, "epoch": 1}
