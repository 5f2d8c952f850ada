"""CheckpointCoordinator: files of each sharing pattern, failures of single ranks, and checkpoints that do not fit."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from forgather.ml.checkpoint.components import SharingPattern, StateComponent
from forgather.ml.checkpoint.coordinator import (
    CheckpointCoordinator,
    CheckpointError,
    CheckpointLoadError,
    CheckpointSaveError,
    CheckpointVersionError,
)
from forgather.ml.checkpoint.manifest import MANIFEST_NAME, CheckpointManifest, read_manifest
from forgather.ml.distributed import StaticDistributedEnvironment
from tests.support.ranks import run_on_ranks
from tests.support.tiny_parallel import (
    Box,
    Failing,
    Outcome,
    box_of_rank,
    captured_logs,
    entries,
    file_names,
    load_box,
    make_coordinator,
    mesh_groups,
    raised,
    save_box,
)

GLOBAL, PER_RANK, REPLICATED, PER_GROUP = (
    SharingPattern.GLOBAL,
    SharingPattern.PER_RANK,
    SharingPattern.REPLICATED,
    SharingPattern.PER_GROUP,
)

# (dp, pp) meshes as lists of pipelines. The ranks of the second mesh follow no numbering of groups.
MESH = [[0, 1], [2, 3]]
PERMUTED_MESH = [[3, 1], [2, 0]]


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


def round_trip_groups(output_dir: str, mesh_ranks: list[list[int]]) -> tuple[str, int, int]:
    """Round-trip weights shared over dp_group, and a data stream shared over pp_group."""
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
def test_per_group_state_has_one_file_per_group(tmp_path: Path, mesh_ranks: list[list[int]]) -> None:
    results = run_on_ranks(round_trip_groups, 4, str(tmp_path), mesh_ranks)
    path = results[0][0]
    assert file_names(path) == {
        f"{key}_state_group_{family}_{number}.pt"
        for key, family in (("weights", "dp_group"), ("stream", "pp_group"))
        for number in (0, 1)
    }
    for rank, (_, stage, replica) in enumerate(results):
        assert rank == mesh_ranks[replica][stage], "each rank has the state of its mesh coordinate"

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
def test_single_copy_state_loads_under_other_patterns(
    tmp_path: Path, before: SharingPattern, after: SharingPattern
) -> None:
    first, second = run_on_ranks(save_under_then_load_under, 2, str(tmp_path), before, after)
    key, expected = ("value", torch.tensor([1.5, 2.5])) if before is REPLICATED else ("tensor", torch.arange(3))
    assert torch.equal(first[key], expected) and torch.equal(second[key], expected)


def save_per_rank_and_load_as_one(output_dir: str, after: SharingPattern) -> Outcome:
    path = save_box(output_dir, PER_RANK, box_of_rank())
    return raised(lambda: load_box(path, after))


@pytest.mark.parametrize("after", [GLOBAL, REPLICATED])
def test_per_rank_state_is_not_loaded_as_one_copy(tmp_path: Path, after: SharingPattern) -> None:
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


def save_and_list(output_dir: str) -> set[str]:
    return file_names(save_box(output_dir, PER_RANK, box_of_rank()))


def test_replaced_checkpoint_keeps_no_files_of_a_larger_job(tmp_path: Path) -> None:
    assert len(run_on_ranks(save_and_list, 4, str(tmp_path))[0]) == 4
    assert run_on_ranks(save_and_list, 2, str(tmp_path))[0] == {"part_state_rank_0.pt", "part_state_rank_1.pt"}


def save_what_only_rank_0_has(output_dir: str) -> Any:
    return load_box(save_box(output_dir, GLOBAL, Failing(1, "save")), GLOBAL)


def test_only_rank_0_provides_global_state(tmp_path: Path) -> None:
    assert run_on_ranks(save_what_only_rank_0_has, 2, str(tmp_path)) == [{"value": 1}] * 2


def load_newest(output_dir: str) -> Any:
    save_box(output_dir, GLOBAL, Box(step=9), step=9)
    save_box(output_dir, GLOBAL, Box(step=10), step=10)
    box = Box()
    make_coordinator(output_dir, [StateComponent("part", box, GLOBAL)]).load_checkpoint()
    return box.state


def test_load_without_a_path_takes_the_newest_checkpoint(tmp_path: Path) -> None:
    assert run_on_ranks(load_newest, 2, str(tmp_path)) == [{"step": 10}] * 2


def test_duplicate_component_key_is_rejected(tmp_path: Path) -> None:
    components = [StateComponent("part", Box(), GLOBAL), StateComponent("part", Box(), GLOBAL)]
    with pytest.raises(ValueError, match="Duplicate component key 'part'"):
        make_coordinator(str(tmp_path), components)


def test_unknown_process_group_is_rejected(tmp_path: Path) -> None:
    component = StateComponent("part", Box(), PER_GROUP, "dp_group")
    with pytest.raises(ValueError, match="unknown process group 'dp_group'"):
        make_coordinator(str(tmp_path), [component])


def test_world_size_without_a_process_group_is_rejected(tmp_path: Path) -> None:
    env = StaticDistributedEnvironment(world_size=2)
    with pytest.raises(RuntimeError, match=r"world_size=2, but torch\.distributed is not initialised"):
        CheckpointCoordinator([], {}, env, str(tmp_path))


def save_by_own_groups(output_dir: str) -> Outcome:
    """Save with process groups that do not match: ranks 0 and 1 pass their own group, rank 2 passes WORLD."""
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    component = StateComponent("part", Box(value=1), PER_GROUP, "dp_group")
    wrong = groups[0] if dist.get_rank() < 2 else dist.group.WORLD
    assert wrong is not None
    return raised(
        lambda: make_coordinator(output_dir, [component], {"dp_group": wrong}).save_checkpoint(checkpoint_id=1)
    )


def test_groups_that_do_not_partition_the_ranks_are_rejected(tmp_path: Path) -> None:
    outcomes = run_on_ranks(save_by_own_groups, 3, str(tmp_path))
    assert {error_type for error_type, _ in outcomes} == {"ValueError"}
    assert all("do not partition the ranks" in message for _, message in outcomes)


def save_with_one_failing(output_dir: str, failing_rank: int) -> tuple[Outcome, float, Any]:
    save_box(output_dir, PER_RANK, box_of_rank(), step=1)
    components = [
        StateComponent("part", box_of_rank(), PER_RANK),
        StateComponent("dataset", Failing(failing_rank, "save"), PER_RANK),
    ]
    coordinator = make_coordinator(output_dir, components)
    start = time.monotonic()
    outcome = raised(lambda: coordinator.save_checkpoint(checkpoint_id=2))
    seconds = time.monotonic() - start
    box = Box()
    make_coordinator(output_dir, [StateComponent("part", box, PER_RANK)]).load_checkpoint()
    return outcome, seconds, box.state["rank"]


@pytest.mark.parametrize("failing_rank", [0, 2])
def test_state_dict_failure_on_one_rank_stops_the_save_everywhere(tmp_path: Path, failing_rank: int) -> None:
    results = run_on_ranks(save_with_one_failing, 3, str(tmp_path), failing_rank)
    outcomes = {outcome for outcome, _, _ in results}
    assert len(outcomes) == 1
    error_type, message = outcomes.pop()
    assert error_type == "CheckpointSaveError"
    assert f"rank {failing_rank} failed" in message
    assert f"ArithmeticError: the iterator of rank {failing_rank} is broken" in message
    assert all(seconds < 10 for _, seconds, _ in results)
    assert entries(tmp_path / "checkpoints") == ["checkpoint-1"], "no debris, and the previous checkpoint stays"
    assert [loaded for _, _, loaded in results] == [0, 1, 2]


def save_what_cannot_be_stored(output_dir: str) -> Outcome:
    box = Box(collate={"functions": [(lambda: 1) if dist.get_rank() == 1 else None]})
    return raised(lambda: save_box(output_dir, PER_RANK, box))


def test_unsupported_state_is_named_at_save(tmp_path: Path) -> None:
    first, second = run_on_ranks(save_what_cannot_be_stored, 2, str(tmp_path))
    assert first == second
    assert first[0] == "CheckpointSaveError"
    assert "part.collate.functions.0" in first[1] and "function" in first[1] and "rank 1" in first[1]
    assert entries(tmp_path / "checkpoints") == []


def save_into_a_taken_file(output_dir: str) -> Outcome:
    """Make one write of rank 1 fail after other files were written, as a full or broken disk would."""
    component = StateComponent("part", box_of_rank(), PER_RANK)
    coordinator = make_coordinator(output_dir, [component])
    snapshot = coordinator.take_snapshot()
    if dist.get_rank() == 1:
        snapshot.files.append(snapshot.files[0])
    path = os.path.join(output_dir, "checkpoints", "checkpoint-1")
    return raised(lambda: coordinator.write_snapshot(snapshot, path))


def test_failed_write_on_one_rank_leaves_nothing_behind(tmp_path: Path) -> None:
    first, second = run_on_ranks(save_into_a_taken_file, 2, str(tmp_path))
    assert first == second
    assert first[0] == "CheckpointSaveError"
    assert "rank 1 failed while writing checkpoint files: FileExistsError" in first[1]
    assert entries(tmp_path / "checkpoints") == []


def load_with_one_failing(output_dir: str) -> Outcome:
    save_box(output_dir, GLOBAL, Box(value=1), key="dataset")
    coordinator = make_coordinator(output_dir, [StateComponent("dataset", Failing(1, "load"), GLOBAL)])
    return raised(coordinator.load_checkpoint)


def test_load_failure_on_one_rank_stops_the_load_everywhere(tmp_path: Path) -> None:
    first, second = run_on_ranks(load_with_one_failing, 2, str(tmp_path))
    assert first == second
    assert first[0] == "CheckpointLoadError"
    assert "rank 1 failed while restoring 'dataset': ArithmeticError: the iterator of rank 1 is broken" in first[1]


def save_two(output_dir: str) -> str:
    components = [
        StateComponent("needed", Box(value=1), GLOBAL),
        StateComponent("extra", box_of_rank(), PER_RANK, required=False),
    ]
    return make_coordinator(output_dir, components).save_checkpoint(checkpoint_id=1)


def load_two(path: str, extra_keys: list[str]) -> tuple[Outcome, list[str], Any, Any]:
    needed, extra = Box(), Box(value="fresh")
    components = [
        StateComponent("needed", needed, GLOBAL),
        StateComponent("extra", extra, PER_RANK, required=False),
        *(StateComponent(key, Box(), GLOBAL) for key in extra_keys),
    ]
    with captured_logs() as lines:
        outcome = raised(lambda: make_coordinator("unused", components).load_checkpoint(path))
    return outcome, lines, needed.state, extra.state


def test_missing_required_component_is_an_error_on_every_rank(tmp_path: Path) -> None:
    path = run_on_ranks(save_two, 2, str(tmp_path))[0]
    results = run_on_ranks(load_two, 2, path, ["scheduler"])
    assert len({outcome for outcome, _, _, _ in results}) == 1
    (error_type, message), _, needed, _ = results[0]
    assert error_type == "CheckpointLoadError"
    assert "required component 'scheduler'" in message and "was saved without it" in message
    assert needed == {}, "nothing was loaded"


def test_deleted_required_file_is_an_error_on_every_rank(tmp_path: Path) -> None:
    path = run_on_ranks(save_two, 2, str(tmp_path))[0]
    os.remove(os.path.join(path, "needed_state.pt"))
    results = run_on_ranks(load_two, 2, path, [])
    assert len({outcome for outcome, _, _, _ in results}) == 1
    (error_type, message), _, _, _ = results[0]
    assert error_type == "CheckpointCorruptError"
    assert "needed_state.pt" in message


def test_deleted_optional_file_starts_the_component_fresh(tmp_path: Path) -> None:
    path = run_on_ranks(save_two, 2, str(tmp_path))[0]
    os.remove(os.path.join(path, "extra_state_rank_1.pt"))
    (_, _, needed_0, extra_0), (outcome, lines, needed_1, extra_1) = run_on_ranks(load_two, 2, path, [])
    assert outcome == ("", "")
    assert any("extra_state_rank_1.pt" in line for line in lines)
    assert needed_0 == needed_1 == {"value": 1}
    assert extra_0["rank"] == 0, "the other rank's file is there"
    assert extra_1 == {"value": "fresh"}


def save_small_optimizer(output_dir: str) -> str:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    component = StateComponent("optimizer", optimizer, GLOBAL, required=False)
    return make_coordinator(output_dir, [component], model=module).save_checkpoint(checkpoint_id=1)


def load_optimizer(path: str, module: nn.Module) -> Outcome:
    component = StateComponent("optimizer", torch.optim.AdamW(module.parameters()), GLOBAL, required=False)
    coordinator = make_coordinator("unused", [component], model=module)
    return raised(lambda: coordinator.load_checkpoint(path))


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (nn.Linear(3, 2), "belongs to a parameter of shape (2, 2), but its shape is (2, 3) now"),
        (nn.Sequential(nn.Linear(2, 2)), "has none of this optimizer's parameters"),
    ],
    ids=["other shapes", "other names"],
)
def test_optional_component_that_does_not_fit_is_an_error(tmp_path: Path, module: nn.Module, text: str) -> None:
    path = run_on_ranks(save_small_optimizer, 2, str(tmp_path))[0]
    first, second = run_on_ranks(load_optimizer, 2, path, module)
    assert first == second
    assert first[0] == "CheckpointLoadError"
    assert text in first[1]


def test_damaged_file_of_an_optional_component_is_an_error(tmp_path: Path) -> None:
    path = run_on_ranks(save_two, 2, str(tmp_path))[0]
    damaged = Path(path) / "extra_state_rank_1.pt"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    results = run_on_ranks(load_two, 2, path, [])
    assert len({outcome for outcome, _, _, _ in results}) == 1
    (error_type, message), _, needed, extra = results[0]
    assert error_type == "CheckpointCorruptError"
    assert "extra_state_rank_1.pt" in message and "expected" in message
    assert (needed, extra) == ({}, {"value": "fresh"}), "nothing was loaded"


def single(output_dir: Path, box: Box | None = None) -> CheckpointCoordinator:
    return make_coordinator(str(output_dir), [StateComponent("part", box or Box(value=1), GLOBAL)])


def test_checkpoint_path_that_is_a_file_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    with pytest.raises(CheckpointSaveError, match="exists and is not a directory"):
        single(tmp_path).save_checkpoint(str(file))
    with pytest.raises(CheckpointError, match="a file, not a checkpoint directory"):
        single(tmp_path).load_checkpoint(str(file))
    assert file.read_text() == "mine"
    assert entries(tmp_path) == ["notes.txt"]


@pytest.mark.parametrize("checkpoint_id", ["../7", "a/b", "", ".hidden"])
def test_checkpoint_id_must_be_a_plain_name(tmp_path: Path, checkpoint_id: str) -> None:
    with pytest.raises(ValueError, match="checkpoint_id="):
        single(tmp_path).save_checkpoint(checkpoint_id=checkpoint_id)
    assert entries(tmp_path) == []


def test_save_needs_a_path_or_an_id(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a checkpoint_path or a checkpoint_id"):
        single(tmp_path).save_checkpoint()


def test_checkpoint_can_be_saved_under_any_path(tmp_path: Path) -> None:
    box = Box(value=3)
    path = single(tmp_path, box).save_checkpoint(str(tmp_path / "elsewhere" / "mine"))
    box.state = {}
    single(tmp_path, box).load_checkpoint(path)
    assert box.state == {"value": 3}


def test_load_without_checkpoint_names_the_searched_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointLoadError, match=r"no complete checkpoint in .*checkpoints"):
        single(tmp_path).load_checkpoint()


def test_newer_format_version_is_rejected(tmp_path: Path) -> None:
    path = single(tmp_path).save_checkpoint(checkpoint_id=1)
    manifest_path = os.path.join(path, MANIFEST_NAME)
    manifest = CheckpointManifest.load(manifest_path)
    manifest.format_version += 1
    manifest.save(manifest_path)
    with pytest.raises(CheckpointVersionError, match="Update forgather"):
        single(tmp_path).load_checkpoint(path)
    with pytest.raises(CheckpointVersionError, match="Update forgather"):
        single(tmp_path).load_checkpoint()


def test_skipping_an_unknown_component_is_rejected(tmp_path: Path) -> None:
    single(tmp_path).save_checkpoint(checkpoint_id=1)
    with pytest.raises(ValueError, match=r"skip_checkpoint_components names the unknown component 'parts'.*'part'"):
        single(tmp_path).load_checkpoint(skip=["parts"])
