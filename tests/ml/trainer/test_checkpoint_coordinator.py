"""Who writes and reads what under each sharing pattern, what is compared at a save, and what happens when ranks fail."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from forgather.ml.checkpoint.manifest import MANIFEST_NAME, CheckpointManifest, read_manifest
from forgather.ml.checkpoint.optimizer_state import OptimizerState
from forgather.ml.checkpoint.rng import RNGState
from forgather.ml.distributed import StaticDistributedEnvironment
from forgather.ml.sharded_checkpoint import make_shard_index
from forgather.ml.trainer.checkpoint_coordinator import (
    CheckpointCoordinator,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointLoadError,
    CheckpointSaveError,
    CheckpointVersionError,
)
from forgather.ml.trainer.checkpoint_types import SharingPattern, StateComponent
from tests.support.ranks import run_on_ranks
from tests.support.tiny_parallel import Box, Failing, captured_logs, entries, make_coordinator, raised

GLOBAL, PER_RANK, REPLICATED = SharingPattern.GLOBAL, SharingPattern.PER_RANK, SharingPattern.REPLICATED
PER_GROUP = SharingPattern.PER_GROUP

# (dp, pp) meshes as lists of pipelines; the second puts ranks at places that no numbering of groups follows.
MESH = [[0, 1], [2, 3]]
PERMUTED_MESH = [[3, 1], [2, 0]]

Outcome = tuple[str, str]


def box_of_rank() -> Box:
    return Box(tensor=torch.arange(3) + 10 * dist.get_rank(), rank=dist.get_rank(), nested={"list": [1, "a"]})


def save_box(output_dir: str, pattern: SharingPattern, box: Box, step: int = 5, key: str = "part") -> str:
    component = StateComponent(key, box, pattern)
    return make_coordinator(output_dir, [component]).save_checkpoint(checkpoint_id=step)


def load_box(path: str, pattern: SharingPattern, key: str = "part") -> Any:
    box = Box()
    make_coordinator("unused", [StateComponent(key, box, pattern)]).load_checkpoint(path)
    return box.state


def file_names(path: str) -> set[str]:
    return set(os.listdir(path)) - {MANIFEST_NAME}


# --- patterns


def round_trip(output_dir: str, pattern: SharingPattern) -> tuple[str, Any]:
    box = Box(rank=0, tensor=torch.arange(3)) if pattern is REPLICATED else box_of_rank()
    path = save_box(output_dir, pattern, box)
    return path, load_box(path, pattern)


@pytest.mark.parametrize(
    ("pattern", "files", "writers", "ranks_back"),
    [
        (GLOBAL, {"part_state.pt"}, [0], [0, 0]),
        (PER_RANK, {"part_state_rank_0.pt", "part_state_rank_1.pt"}, [0, 1], [0, 1]),
        (REPLICATED, {"part_state.pt"}, [0], [0, 0]),
    ],
)
def test_each_rank_gets_its_state_back(
    tmp_path: Path, pattern: SharingPattern, files: set[str], writers: list[int], ranks_back: list[int]
) -> None:
    results = run_on_ranks(round_trip, 2, str(tmp_path), pattern)
    path = results[0][0]
    assert Path(path) == tmp_path / "checkpoints" / "checkpoint-5"
    assert file_names(path) == files
    manifest = read_manifest(path)
    described = manifest.components["part"]
    assert (described.sharing_pattern, described.ranks) == (pattern.value, writers)
    assert described.replicated_across == ([0, 1] if pattern is REPLICATED else None)
    assert (manifest.world_size, manifest.step) == (2, 5)
    assert {record.path: record.writer_rank for record in manifest.files} == dict(
        zip(sorted(files), writers, strict=True)
    )
    for rank, (_, state) in zip(ranks_back, results, strict=True):
        assert state["rank"] == rank
        assert torch.equal(state["tensor"], torch.arange(3) + 10 * rank)


def mesh_groups(ranks: list[list[int]]) -> tuple[DeviceMesh, dict[str, Any]]:
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "pp"))
    return mesh, {"dp_group": mesh.get_group("dp"), "pp_group": mesh.get_group("pp")}


def round_trip_groups(output_dir: str, mesh_ranks: list[list[int]]) -> tuple[str, int, int]:
    """Weights of a stage are shared over dp_group, the data stream of a pipeline over pp_group."""
    mesh, groups = mesh_groups(mesh_ranks)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None

    def components(replica: int, stage: int) -> list[StateComponent]:
        return [
            StateComponent("weights", Box(stage=stage), PER_GROUP, "dp_group", validate_replication=True),
            StateComponent("stream", Box(replica=replica), PER_GROUP, "pp_group", validate_replication=True),
        ]

    path = make_coordinator(output_dir, components(*coordinate), groups, mesh=mesh).save_checkpoint(checkpoint_id=1)
    loaded = components(-1, -1)
    make_coordinator(output_dir, loaded, groups).load_checkpoint()
    weights, stream = (component.stateful.state for component in loaded)
    return path, weights["stage"], stream["replica"]


@pytest.mark.parametrize("mesh_ranks", [MESH, PERMUTED_MESH])
def test_each_group_of_a_family_has_one_file_and_its_members_get_it_back(
    tmp_path: Path, mesh_ranks: list[list[int]]
) -> None:
    results = run_on_ranks(round_trip_groups, 4, str(tmp_path), mesh_ranks)
    path = results[0][0]
    assert file_names(path) == {
        f"{key}_state_group_{family}_{number}.pt"
        for key, family in (("weights", "dp_group"), ("stream", "pp_group"))
        for number in (0, 1)
    }
    for rank, (_, stage, replica) in enumerate(results):
        assert rank == mesh_ranks[replica][stage], "each rank has the state of its own place"

    manifest = read_manifest(path)
    assert manifest.mesh == {"shape": [2, 2], "axis_names": ["dp", "pp"]}
    stages = [sorted(row[stage] for row in mesh_ranks) for stage in (0, 1)]
    pipelines = [sorted(row) for row in mesh_ranks]
    for key, groups in (("weights", sorted(stages)), ("stream", sorted(pipelines))):
        records = manifest.component_files(key)
        assert [record.path[-len("0.pt") :] for record in records] == ["0.pt", "1.pt"]
        assert [record.owner_ranks for record in records] == groups, "numbered by their lowest rank"
        assert manifest.components[key].ranks == [ranks[0] for ranks in groups]
        assert manifest.components[key].metadata["replication"] == "verified"


def save_under_then_load_under(output_dir: str, before: SharingPattern, after: SharingPattern) -> Any:
    box = Box(value=torch.tensor([1.5, 2.5])) if before is REPLICATED else box_of_rank()
    return load_box(save_box(output_dir, before, box), after)


@pytest.mark.parametrize(
    ("before", "after"),
    [(REPLICATED, GLOBAL), (GLOBAL, REPLICATED), (GLOBAL, PER_RANK), (REPLICATED, PER_RANK)],
)
def test_state_of_one_copy_is_read_under_every_other_pattern(
    tmp_path: Path, before: SharingPattern, after: SharingPattern
) -> None:
    first, second = run_on_ranks(save_under_then_load_under, 2, str(tmp_path), before, after)
    key, expected = ("value", torch.tensor([1.5, 2.5])) if before is REPLICATED else ("tensor", torch.arange(3))
    assert torch.equal(first[key], expected) and torch.equal(second[key], expected)


def save_per_rank_and_load_as_one(output_dir: str, after: SharingPattern) -> Outcome:
    path = save_box(output_dir, PER_RANK, box_of_rank())
    return raised(lambda: load_box(path, after))


@pytest.mark.parametrize("after", [GLOBAL, REPLICATED])
def test_state_that_each_rank_had_is_not_taken_for_one_state(tmp_path: Path, after: SharingPattern) -> None:
    first, second = run_on_ranks(save_per_rank_and_load_as_one, 2, str(tmp_path), after)
    assert first == second
    assert first[0] == "CheckpointLoadError"
    assert "'part' was saved as per_rank by 2 ranks" in first[1]


def save_twice_and_load(output_dir: str) -> tuple[list[str], Any]:
    save_box(output_dir, PER_RANK, Box(value="old", gone=dist.get_rank()), step=5)
    path = save_box(output_dir, PER_RANK, Box(value=f"new {dist.get_rank()}"), step=5)
    return entries(os.path.dirname(path)), load_box(path, PER_RANK)


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    results = run_on_ranks(save_twice_and_load, 2, str(tmp_path))
    assert results == [(["checkpoint-5"], {"value": f"new {rank}"}) for rank in range(2)]


def load_newest(output_dir: str) -> Any:
    save_box(output_dir, GLOBAL, Box(step=9), step=9)
    save_box(output_dir, GLOBAL, Box(step=10), step=10)
    box = Box()
    make_coordinator(output_dir, [StateComponent("part", box, GLOBAL)]).load_checkpoint()
    return box.state


def test_without_a_path_the_newest_checkpoint_is_loaded(tmp_path: Path) -> None:
    assert run_on_ranks(load_newest, 2, str(tmp_path)) == [{"step": 10}] * 2


# --- random numbers and data at another number of ranks


def draws() -> list[float]:
    return [float(value) for value in torch.rand(3)]


def rng_component() -> StateComponent:
    return StateComponent("rng", RNGState(42), PER_RANK, required=False)


def save_rng(output_dir: str) -> list[float]:
    torch.manual_seed(100 + dist.get_rank())
    make_coordinator(output_dir, [rng_component()]).save_checkpoint(checkpoint_id=8)
    return draws()


def load_rng(output_dir: str) -> list[float]:
    torch.manual_seed(999)
    make_coordinator(output_dir, [rng_component()]).load_checkpoint()
    return draws()


def derived_draws(rank: int, step: int) -> list[float]:
    RNGState(42).init_new_rank(rank, step)
    return draws()


def test_known_ranks_get_their_random_numbers_back_and_new_ranks_derive_theirs(tmp_path: Path) -> None:
    saved = run_on_ranks(save_rng, 2, str(tmp_path))
    assert saved[0] != saved[1]
    assert run_on_ranks(load_rng, 2, str(tmp_path)) == saved
    assert run_on_ranks(load_rng, 1, str(tmp_path)) == saved[:1]
    grown = run_on_ranks(load_rng, 3, str(tmp_path))
    assert grown[:2] == saved
    assert grown[2] == derived_draws(2, 8)
    assert grown[2] != derived_draws(2, 9)
    assert run_on_ranks(load_rng, 3, str(tmp_path)) == grown


def save_dataset(output_dir: str, pattern: SharingPattern) -> str:
    components = [
        StateComponent("dataset", Box(position=100 + dist.get_rank()), pattern, required=False),
        StateComponent("trainer", Box(step=3), REPLICATED),
    ]
    return make_coordinator(output_dir, components).save_checkpoint(checkpoint_id=3)


def load_dataset(output_dir: str, pattern: SharingPattern, skip: list[str]) -> tuple[Outcome, Any, Any]:
    dataset, trainer = Box(position="fresh"), Box()
    components = [
        StateComponent("dataset", dataset, pattern, required=False),
        StateComponent("trainer", trainer, REPLICATED),
    ]
    coordinator = make_coordinator(output_dir, components)
    outcome = raised(lambda: coordinator.load_checkpoint(skip=skip))
    return outcome, dataset.state, trainer.state


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(2, 3), (2, 1), (1, 2)])
def test_data_positions_of_ranks_do_not_move_to_another_number_of_ranks(
    tmp_path: Path, saved_on: int, loaded_on: int
) -> None:
    run_on_ranks(save_dataset, saved_on, str(tmp_path), PER_RANK)
    results = run_on_ranks(load_dataset, loaded_on, str(tmp_path), PER_RANK, [])
    outcomes = {outcome for outcome, _, _ in results}
    assert len(outcomes) == 1, outcomes
    error_type, message = outcomes.pop()
    assert error_type == "CheckpointLoadError"
    assert 'skip_checkpoint_components=["dataset"]' in message
    assert "dispatch_batches=True" in message
    for _, dataset, trainer in results:
        assert (dataset, trainer) == ({"position": "fresh"}, {}), "nothing was changed"

    skipped = run_on_ranks(load_dataset, loaded_on, str(tmp_path), PER_RANK, ["dataset"])
    assert skipped == [(("", ""), {"position": "fresh"}, {"step": 3})] * loaded_on


def test_data_positions_of_ranks_come_back_at_the_same_number_of_ranks(tmp_path: Path) -> None:
    run_on_ranks(save_dataset, 2, str(tmp_path), PER_RANK)
    results = run_on_ranks(load_dataset, 2, str(tmp_path), PER_RANK, [])
    assert [dataset["position"] for _, dataset, _ in results] == [100, 101]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_one_global_data_position_is_loaded_at_any_number_of_ranks(tmp_path: Path, world_size: int) -> None:
    run_on_ranks(save_dataset, 2, str(tmp_path), GLOBAL)
    results = run_on_ranks(load_dataset, world_size, str(tmp_path), GLOBAL, [])
    assert results == [(("", ""), {"position": 100}, {"step": 3})] * world_size
