"""Declarations are checked at save: replicas have the same tensors, and a shard index lists the written tensors."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from forgather.ml.checkpoint.components import SharingPattern, StateComponent
from forgather.ml.checkpoint.coordinator import CheckpointCoordinator, CheckpointSaveError
from forgather.ml.checkpoint.weights.module_weights import ShardIndex, load_checkpoint, make_shard_index
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import tiny_llama
from tests.support.tiny_parallel import (
    HYBRID,
    Box,
    Outcome,
    TinyTrainer,
    captured_logs,
    entries,
    file_names,
    make_coordinator,
    raised,
)

GLOBAL, PER_RANK, REPLICATED = SharingPattern.GLOBAL, SharingPattern.PER_RANK, SharingPattern.REPLICATED


def the_same(outcomes: list[Outcome]) -> str:
    """Return the message of the error that every rank raised."""
    assert len(set(outcomes)) == 1, "the same error on every rank"
    error_type, message = outcomes[0]
    assert error_type == "CheckpointSaveError"
    return message


# --- tensor names of replicas


def save_over_the_wrong_family(output_dir: str, with_index: bool, key: str) -> Outcome:
    """Save with one component declared over the pipeline group instead of the data-parallel group."""
    trainer = TinyTrainer(HYBRID)
    trainer.train()
    components = [
        dataclasses.replace(
            one,
            process_group_name="pp_group" if one.key == key else one.process_group_name,
            validate_replication=False,
        )
        for one in trainer.components()
    ]
    index = make_shard_index([stage.state_dict() for stage in trainer.stages], safetensors=True)
    options: dict[str, Any] = {"model_parts": trainer.parts, "shard_index": index if with_index else None}
    coordinator = make_coordinator(output_dir, components, trainer.groups, **options)
    return raised(lambda: coordinator.save_checkpoint(checkpoint_id=1))


@pytest.mark.parametrize("with_index", [True, False])
@pytest.mark.parametrize(
    ("key", "tensor"),
    [("model", "embed.weight"), ("optimizer", "state.embed.weight.exp_avg")],
    ids=["model", "optimizer"],
)
def test_stages_declared_over_the_wrong_group_are_rejected(
    tmp_path: Path, with_index: bool, key: str, tensor: str
) -> None:
    message = the_same(run_on_ranks(save_over_the_wrong_family, 4, str(tmp_path), with_index, key))
    assert f"Component {key!r} is declared PER_GROUP over 'pp_group': ranks 0, 1 must have the same tensors" in message
    assert "only on rank 0" in message and "only on rank 1" in message
    assert tensor.split(".")[-1] in message and "PER_RANK" in message
    assert entries(tmp_path / "checkpoints") == [], "nothing was written"


def save_replicas(output_dir: str, difference: str, required: bool, level: str) -> Outcome:
    state: dict[str, Any] = {"deep": {"moments": [torch.ones(2)]}, "count": 1}
    if dist.get_rank() == 1:
        changed: dict[str, dict[str, Any]] = {
            "tensor": {"extra": {"sum": torch.ones(1)}},
            "value": {"deep": {"moments": [torch.zeros(2)]}},
            "number": {"more": 2},
        }
        state |= changed[difference]
    component = StateComponent("average", Box(**state), REPLICATED, required=required, validation_level=level)
    return raised(lambda: make_coordinator(output_dir, [component]).save_checkpoint(checkpoint_id=1))


@pytest.mark.parametrize(("required", "level"), [(True, "tensor"), (False, "tensor"), (True, "none")])
def test_replicas_with_different_tensors_are_rejected_without_validation(
    tmp_path: Path, required: bool, level: str
) -> None:
    message = the_same(run_on_ranks(save_replicas, 3, str(tmp_path), "tensor", required, level))
    assert "Component 'average' is declared REPLICATED: ranks 0, 1, 2" in message
    assert "1 tensors are not on all of them: extra.sum only on rank 1" in message
    assert entries(tmp_path / "checkpoints") == []


@pytest.mark.parametrize("difference", ["value", "number"])
def test_only_tensor_names_are_compared_without_validation(tmp_path: Path, difference: str) -> None:
    assert run_on_ranks(save_replicas, 2, str(tmp_path), difference, True, "tensor") == [("", "")] * 2


def save_what_some_declare(output_dir: str) -> Outcome:
    components = [StateComponent("part", Box(value=1), REPLICATED)]
    if dist.get_rank() == 1:
        components.append(StateComponent("extra", Box(value=torch.ones(1)), REPLICATED))
    return raised(lambda: make_coordinator(output_dir, components).save_checkpoint(checkpoint_id=1))


def test_replicated_component_missing_on_some_ranks_is_rejected(tmp_path: Path) -> None:
    message = the_same(run_on_ranks(save_what_some_declare, 3, str(tmp_path)))
    assert "Component 'extra' is declared REPLICATED by some ranks, but not by ranks 0, 2" in message
    assert entries(tmp_path / "checkpoints") == []


# --- shard index


def parts_of(seed: int) -> list[nn.ModuleDict]:
    torch.manual_seed(seed)
    layers = {str(number): nn.Linear(2, 2) for number in range(4)}
    return [nn.ModuleDict({name: layers[name] for name in names}) for names in (("0", "1"), ("2", "3"))]


def index_for(case: str, rank: int) -> ShardIndex:
    first, second = (part.state_dict() for part in parts_of(1))
    index = make_shard_index([first, second], safetensors=True)
    files = sorted(set(index["weight_map"].values()))
    if case == "tensor":
        index["weight_map"]["4.weight"] = files[1]
    elif case == "file":
        index["weight_map"]["4.weight"] = "model-00003-of-00003.safetensors"
    elif case == "file of two":
        index["weight_map"] = dict.fromkeys(index["weight_map"], files[0])
    elif case == "other ranks" and rank == 1:
        return make_shard_index([first, second], safetensors=True, max_shard_size=16)
    elif case == "lost" and rank == 1:
        return make_shard_index([first, {"2.weight": second["2.weight"]}], safetensors=True)
    return index


def save_with_index(output_dir: str, case: str) -> Outcome:
    own = parts_of(1)[dist.get_rank()]
    component = StateComponent("model", own, PER_RANK)
    coordinator = make_coordinator(
        output_dir, [component], model_parts=[own], shard_index=index_for(case, dist.get_rank())
    )
    return raised(lambda: coordinator.save_checkpoint(checkpoint_id=1))


@pytest.mark.parametrize(
    ("case", "texts"),
    [
        ("tensor", ["lists 1 tensors that no rank writes", "none of ranks 0, 1 writes tensor 4.weight"]),
        ("file", ["model-00003-of-00003.safetensors should have 4.weight", "writes that file"]),
        ("file of two", ["puts tensors of different ranks into model-00001-of-00002.safetensors", "ranks 0, 1"]),
        ("other ranks", ["no rank writes", "model-00002-of-00002.safetensors", "ranks 0, 1"]),
        ("lost", ["no rank writes", "2.bias", "ranks 0, 1"]),
    ],
)
def test_shard_index_that_differs_from_written_files_is_rejected(tmp_path: Path, case: str, texts: list[str]) -> None:
    message = the_same(run_on_ranks(save_with_index, 2, str(tmp_path), case))
    assert "'model'" in message
    for text in texts:
        assert text in message
    assert entries(tmp_path / "checkpoints") == []


@pytest.mark.parametrize("file", ["model.safetensors", "model-00002-of-00002.safetensors"])
def test_single_rank_rejects_an_index_with_unknown_tensors(tmp_path: Path, file: str) -> None:
    model = nn.Linear(2, 2)
    index = make_shard_index([model.state_dict()], safetensors=True)
    index["weight_map"]["scale"] = file
    coordinator = make_coordinator(str(tmp_path), [StateComponent("model", model, GLOBAL)], shard_index=index)
    with pytest.raises(CheckpointSaveError, match=r"lists 1 tensors that no rank writes.*scale"):
        coordinator.save_checkpoint(checkpoint_id=1)
    assert entries(tmp_path / "checkpoints") == []


def test_single_file_with_a_custom_name_in_the_index_loads(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    index = ShardIndex(metadata={}, weight_map=dict.fromkeys(model.state_dict(), "weights.safetensors"))
    component = StateComponent("model", model, GLOBAL)
    path = make_coordinator(str(tmp_path), [component], shard_index=index).save_checkpoint(checkpoint_id=1)
    assert file_names(path) == {"weights.safetensors", "model.safetensors.index.json"}
    other = nn.Linear(2, 2)
    load_checkpoint(path, other)
    assert torch.equal(other.weight, model.weight)


# --- a transformers model split over ranks


class Part(nn.Module):
    """One of two halves of a Llama, with the tensor names of the full model."""

    def __init__(self, whole: LlamaForCausalLM, number: int, forgets_norm: bool = False) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleDict({str(number): whole.model.layers[number]})
        if number == 0:
            self.model.embed_tokens = whole.model.embed_tokens
        else:
            self.lm_head = whole.lm_head
            if not forgets_norm:
                self.model.norm = whole.model.norm


def coordinator_of_part(output_dir: str, forgets_norm: bool = False, **options: Any) -> CheckpointCoordinator:
    whole = tiny_llama()
    part = Part(whole, dist.get_rank(), forgets_norm)
    component = StateComponent("model", part, PER_RANK)
    return make_coordinator(output_dir, [component], model=whole, model_parts=[part], **options)


def save_and_export_parts(output_dir: str, forgets_norm: bool) -> tuple[str, Outcome, list[str]]:
    coordinator = coordinator_of_part(output_dir, forgets_norm)
    with captured_logs() as lines:
        path = coordinator.save_checkpoint(checkpoint_id=1)
    return path, raised(lambda: coordinator.export_model(f"{output_dir}/exported")), lines


def test_shards_of_all_ranks_load_as_the_full_model(tmp_path: Path) -> None:
    results = run_on_ranks(save_and_export_parts, 2, str(tmp_path), False)
    assert [(outcome, lines) for _, outcome, lines in results] == [(("", ""), [])] * 2
    expected = tiny_llama().state_dict()
    for directory in (results[0][0], str(tmp_path / "exported")):
        loaded = AutoModelForCausalLM.from_pretrained(directory).state_dict()
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_tensor_missing_on_all_ranks_stops_export_and_omits_configuration(
    tmp_path: Path,
) -> None:
    results = run_on_ranks(save_and_export_parts, 2, str(tmp_path), True)
    message = the_same([outcome for _, outcome, _ in results])
    assert (
        "LlamaForCausalLM" in message and "random weights for 1 tensors" in message and "model.norm.weight" in message
    )
    assert entries(tmp_path / "exported") == []
    path = results[0][0]
    assert not {"config.json", "generation_config.json"} & file_names(path)
    assert [len(lines) for _, _, lines in results] == [1, 0], "only the rank that writes the files logs it"
    assert "model.norm.weight" in results[0][2][0]
    with pytest.raises((OSError, ValueError), match=r"config\.json"):
        AutoModelForCausalLM.from_pretrained(path)


def save_parts_on_storage_of_their_own(output_dir: str) -> tuple[str, bool, Outcome]:
    own_dir = f"{output_dir}/{dist.get_rank()}"
    coordinator = coordinator_of_part(own_dir, storage_scope="rank")
    path = coordinator.save_checkpoint(checkpoint_id=1)
    coordinator.load_checkpoint(path)
    return path, "config.json" in file_names(path), raised(lambda: coordinator.export_model(f"{own_dir}/exported"))


def test_directory_with_only_some_stages_is_no_model_directory(tmp_path: Path) -> None:
    results = run_on_ranks(save_parts_on_storage_of_their_own, 2, str(tmp_path))
    assert [described for _, described, _ in results] == [False, False]
    message = the_same([outcome for _, _, outcome in results])
    assert "export to storage that all ranks share" in message
