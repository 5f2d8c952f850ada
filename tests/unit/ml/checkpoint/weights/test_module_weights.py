"""Weight files: tied tensors are stored once, shards follow their index, and other libraries can read them."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.errors import CheckpointCorruptError, CheckpointLoadError
from forgather.ml.checkpoint.files import state_files
from forgather.ml.checkpoint.files.planned_file import Content, PlannedFile, RawContent, WeightsContent
from forgather.ml.checkpoint.files.regular_files import open_regular
from forgather.ml.checkpoint.manifest import CheckpointManifest, ComponentManifest, read_manifest, utc_now
from forgather.ml.checkpoint.weights.index import (
    create_sharing_metadata,
    get_all_fqns,
    id_to_fqn,
    make_shard_index,
    retie_parameters,
)
from forgather.ml.checkpoint.weights.module_weights import (
    load_checkpoint,
    load_shard_index,
    load_sharded_checkpoint,
    save_checkpoint,
    save_sharded_checkpoint,
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
def test_module_round_trips(tmp_path: Path, in_safetensors: bool, max_shard_size: int) -> None:
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


def test_safetensors_files_are_compatible_with_the_library(tmp_path: Path) -> None:
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


def test_tied_weights_are_found_on_meta_and_retied() -> None:
    with torch.device("meta"):
        model = Tied()
    sharing = create_sharing_metadata(model)
    assert sharing == [["embedding.weight", "head.weight"]]
    model.to_empty(device="cpu")
    model.head.weight = nn.Parameter(torch.zeros(11, 5))
    retie_parameters(model, sharing)
    assert model.head.weight is model.embedding.weight


def test_meta_module_is_filled_with_assign(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tied()
    save_checkpoint(str(tmp_path), model)
    with torch.device("meta"):
        empty = Tied()
    load_checkpoint(str(tmp_path), empty, assign=True)
    assert_same(model, empty)
    assert empty.head.weight is empty.embedding.weight and empty.head.weight.requires_grad


def test_stage_reads_only_its_own_tensors(tmp_path: Path) -> None:
    """The head finds the tied tensor under its stored name."""
    torch.manual_seed(0)
    model = Tied()
    save_checkpoint(str(tmp_path), model)
    loaded = load_checkpoint(str(tmp_path), keys=["head.weight", "table"])
    assert loaded is not None and sorted(loaded) == ["head.weight", "table"]
    assert torch.equal(loaded["head.weight"], model.embedding.weight)
    with pytest.raises(CheckpointLoadError, match="no tensors named nonsense"):
        load_checkpoint(str(tmp_path), keys=["nonsense"])


def test_shards_never_mix_writers_and_respect_max_shard_size() -> None:
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
    load_sharded_checkpoint(str(tmp_path), part)
    assert torch.equal(part["1"].weight, whole[1].weight)


def test_mismatched_names_and_shapes_are_rejected_by_name(tmp_path: Path) -> None:
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


def test_truncated_or_malformed_header_is_rejected(tmp_path: Path) -> None:
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


def test_module_with_custom_state_dict_uses_its_own_load(tmp_path: Path) -> None:
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


def test_fqns_include_tied_and_exclude_non_persistent_tensors() -> None:
    model = Tied()
    assert id_to_fqn(model)[id(model.head.weight)] == ["embedding.weight", "head.weight"]
    assert "head.weight" in get_all_fqns(model) and "scratch" not in get_all_fqns(model)


def commit(path: Path, contents: dict[str, Content]) -> None:
    """Commit a checkpoint of these files."""
    transaction = store.Transaction(str(path), store.new_attempt())
    transaction.begin(0)
    files = [PlannedFile(name, "model", one).write(transaction.temporary_path, 0) for name, one in contents.items()]
    components = {"model": ComponentManifest("model", "global", [0])}
    transaction.commit(CheckpointManifest(str(path), 1, utc_now(), components, files=files))


def weights_of(model: nn.Module) -> WeightsContent:
    sharing = create_sharing_metadata(model)
    tied = {name for group in sharing for name in group[1:]}
    return WeightsContent({name: one for name, one in model.state_dict().items() if name not in tied}, sharing)


def test_bit_flip_in_any_header_byte_is_damage(tmp_path: Path) -> None:
    commit(tmp_path / "checkpoint", {"model.safetensors": weights_of(Tied())})
    path = tmp_path / "checkpoint" / "model.safetensors"
    intact = path.read_bytes()
    for position in range(8 + int.from_bytes(intact[:8], "little")):
        damaged = bytearray(intact)
        damaged[position] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        for module in (Tied(), None):
            with pytest.raises(CheckpointCorruptError, match=r"model\.safetensors is damaged"):
                load_checkpoint(str(tmp_path / "checkpoint"), module)


def test_only_weights_listed_in_the_manifest_are_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, stray, other = Tied(), Tied(), Tied()
    commit(tmp_path / "bin", {"pytorch_model.bin": weights_of(model)})
    save_checkpoint(str(tmp_path / "stray"), stray)
    (tmp_path / "bin" / "model.safetensors").write_bytes((tmp_path / "stray" / "model.safetensors").read_bytes())
    (tmp_path / "bin" / "model.safetensors.index.json").write_text("{}")
    load_checkpoint(str(tmp_path / "bin"), other)
    assert torch.equal(other.head.weight, model.head.weight)

    commit(tmp_path / "none", {"config.json": RawContent(b"{}")})
    (tmp_path / "none" / "model.safetensors").write_bytes((tmp_path / "stray" / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointLoadError, match=r"no weight files .* checkpoint_manifest"):
        load_checkpoint(str(tmp_path / "none"), other)


@pytest.mark.parametrize("file", ["../stray/model.safetensors", "/etc/passwd", "stray.safetensors", 7, None])
def test_index_path_outside_the_checkpoint_is_rejected(tmp_path: Path, file: Any) -> None:
    save_checkpoint(str(tmp_path / "stray"), nn.Linear(2, 2))
    index = json.dumps({"metadata": {}, "weight_map": {"weight": file, "bias": file}}).encode()
    commit(tmp_path / "sealed", {"model.safetensors.index.json": RawContent(index)})
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(CheckpointCorruptError, match="is not an index of weights"):
        load_checkpoint(str(tmp_path / "sealed"), nn.Linear(2, 2))
    with pytest.raises(CheckpointLoadError, match=r"is not an index of weights|stray\.safetensors is missing"):
        load_checkpoint(str(tmp_path / "plain"), nn.Linear(2, 2))
    with pytest.raises(CheckpointCorruptError, match="is not an index of weights"):
        load_sharded_checkpoint(str(tmp_path / "sealed"), nn.Linear(2, 2))
    with pytest.raises(CheckpointCorruptError, match="is not an index of weights"):
        load_shard_index(str(tmp_path / "sealed"))


@pytest.mark.parametrize(
    "index",
    [
        "[]",
        "{}",
        "[" * 100_000,
        '{"weight_map": []}',
        '{"weight_map": {}, "metadata": []}',
        '{"weight_map": {}, "metadata": {"param_sharing": [[1]]}}',
    ],
    ids=["list", "empty", "deep", "map", "metadata", "sharing"],
)
def test_malformed_index_is_rejected(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointLoadError, match="is not an index of weights"):
        load_checkpoint(str(tmp_path), nn.Linear(2, 2))


def entry(shape: Any, start: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"weight": {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}}


@pytest.mark.parametrize(
    "header",
    [
        entry([2], -8, 0),
        entry([-2], 8, 0),
        entry([-2, -1], 0, 8),
        entry([2], 12, 20),
        entry([1.0], 0, 4),
        entry([True], 0, 4),
        entry([2**62, 2**62, 0], 0, 0),
        entry("2", 0, 8),
        entry([2], 0, "8"),
        entry([2], 0, 8, dtype=["F32"]),
        {"weight": 3},
        {"weight": {}},
        {"__metadata__": []},
        {"__metadata__": {"param_sharing": "["}},
        {"__metadata__": {"param_sharing": "{}"}},
        {"__metadata__": {"param_sharing": 3}},
    ],
    ids=str,
)
def test_header_with_impossible_values_is_rejected(tmp_path: Path, header: dict[str, Any]) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    with pytest.raises(CheckpointCorruptError, match=r"model\.safetensors is damaged"):
        load_checkpoint(str(tmp_path))


@pytest.mark.parametrize("max_shard_size", [2**32, 150])
@pytest.mark.parametrize("in_safetensors", [True, False])
def test_saved_model_replaces_the_previous_one(tmp_path: Path, in_safetensors: bool, max_shard_size: int) -> None:
    torch.manual_seed(0)
    (tmp_path / "notes.txt").write_text("mine")
    for was_safetensors, earlier_size in [(True, 2**32), (True, 60), (False, 2**32), (False, 150)]:
        save_checkpoint(str(tmp_path), Tied(), safetensors=was_safetensors, max_shard_size=earlier_size)
        model, other = Tied(), Tied()
        index = save_checkpoint(str(tmp_path), model, safetensors=in_safetensors, max_shard_size=max_shard_size)
        load_checkpoint(str(tmp_path), other)
        assert_same(model, other)
        expected = {*index["weight_map"].values(), "notes.txt"}
        if max_shard_size == 150:
            expected.add("model.safetensors.index.json" if in_safetensors else "pytorch_model.bin.index.json")
        assert set(os.listdir(tmp_path)) == expected


def test_failed_save_keeps_the_previous_model(tmp_path: Path) -> None:
    model = nn.Linear(3, 4)
    save_checkpoint(str(tmp_path), model)
    broken = nn.Linear(3, 4)
    broken.register_buffer("wide", torch.zeros(3, dtype=torch.complex128))
    index = make_shard_index(broken.state_dict(), safetensors=True)
    with pytest.raises(ValueError, match="'wide' has dtype"):
        save_sharded_checkpoint(str(tmp_path), index, broken)
    with pytest.raises(ValueError, match="'wide' has dtype"):
        save_checkpoint(str(tmp_path), broken)
    assert os.listdir(tmp_path) == ["model.safetensors"]
    other = nn.Linear(3, 4)
    load_checkpoint(str(tmp_path), other)
    assert_same(model, other)


def test_loading_a_meta_module_in_place_is_rejected(tmp_path: Path) -> None:
    save_checkpoint(str(tmp_path), Tied())
    with torch.device("meta"):
        empty = Tied()
    with pytest.raises(CheckpointLoadError, match=r"on the meta device.*embedding\.weight.*assign=True.*to_empty"):
        load_checkpoint(str(tmp_path), empty)


def test_loading_selected_keys_does_not_warn_about_other_tensors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_checkpoint(str(tmp_path), nn.Linear(3, 4))
    with caplog.at_level(logging.WARNING):
        load_checkpoint(str(tmp_path), nn.Linear(3, 4), keys=["bias"])
    assert caplog.text == ""


@pytest.mark.parametrize("in_safetensors", [True, False])
def test_views_are_written_without_their_full_storage(tmp_path: Path, in_safetensors: bool) -> None:
    module = nn.Module()
    module.register_buffer("view", torch.randn(1_000_000)[10:20])
    save_checkpoint(str(tmp_path), module, safetensors=in_safetensors)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 10_000
    loaded = load_checkpoint(str(tmp_path))
    assert loaded is not None and torch.equal(loaded["view"], module.get_buffer("view"))


@pytest.mark.parametrize("in_safetensors", [True, False])
def test_conjugated_and_negated_views_are_stored_by_value(tmp_path: Path, in_safetensors: bool) -> None:
    torch.manual_seed(0)
    values = torch.randn(3, dtype=torch.complex64)
    module, other = nn.Module(), nn.Module()
    for name, tensor in {"plain": values, "conjugated": values.conj(), "negated": values.conj().imag}.items():
        module.register_buffer(name, tensor)
    for name, memory in {"plain": values, "conjugated": values, "negated": values.conj().imag}.items():
        # The destination buffer `negated` is a negated view as well.
        other.register_buffer(name, memory if name == "negated" else torch.zeros_like(memory))
    expected = {name: tensor.resolve_conj().resolve_neg().clone() for name, tensor in module.state_dict().items()}
    save_checkpoint(str(tmp_path), module, safetensors=in_safetensors)
    values.zero_()
    load_checkpoint(str(tmp_path), other)
    for name, tensor in expected.items():
        assert torch.equal(other.state_dict()[name], tensor), name


def test_sparse_tensors_need_bin_files(tmp_path: Path) -> None:
    module, other = nn.Module(), nn.Module()
    module.register_buffer("adjacency", torch.eye(3).to_sparse())
    other.register_buffer("adjacency", torch.zeros(3, 3).to_sparse())
    with pytest.raises(ValueError, match=r"'adjacency' is sparse.*save_safetensors=False"):
        save_checkpoint(str(tmp_path), module)
    save_checkpoint(str(tmp_path), module, safetensors=False)
    load_checkpoint(str(tmp_path), other)
    assert torch.equal(other.get_buffer("adjacency").to_dense(), torch.eye(3))


@pytest.mark.parametrize("with_module", [True, False])
def test_bin_file_of_a_checkpoint_is_read_once(
    tmp_path: Path, with_module: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Tied()
    commit(tmp_path / "checkpoint", {"pytorch_model.bin": weights_of(model)})
    assert "table" in read_manifest(str(tmp_path / "checkpoint")).files[0].tensors
    opened = []

    def counted(path: str, **options: bool) -> int:
        opened.append(path)
        return open_regular(path, **options)

    monkeypatch.setattr(state_files, "open_regular", counted)
    loaded = load_checkpoint(str(tmp_path / "checkpoint"), Tied() if with_module else None)
    assert len(opened) == 1
    assert loaded is None or torch.equal(loaded["embedding.weight"], model.embedding.weight)


def test_bin_file_without_weights_is_rejected(tmp_path: Path) -> None:
    for content in ([torch.zeros(2)], {"weight": 3}):
        torch.save(content, tmp_path / "pytorch_model.bin")
        with pytest.raises(CheckpointLoadError, match="not a weight file"):
            load_checkpoint(str(tmp_path), nn.Linear(2, 2))
