"""Replica validation at save: a difference between replicas stops the save on every rank."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from forgather.ml.checkpoint.components import SharingPattern, StateComponent
from forgather.ml.checkpoint.manifest import read_manifest
from tests.support.ranks import run_on_ranks
from tests.support.tiny_parallel import (
    Box,
    Outcome,
    captured_logs,
    entries,
    make_coordinator,
    mesh_groups,
    raised,
)

REPLICATED, PER_GROUP = SharingPattern.REPLICATED, SharingPattern.PER_GROUP

# Ranks 3 and 2 are replicas of one stage, ranks 1 and 0 of the other.
PERMUTED_MESH = [[3, 1], [2, 0]]


class Replica:
    """Module and optimizer after one step, with state of several dtypes and depths."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(3)
        self.module = nn.Sequential(nn.Linear(2, 1000), nn.BatchNorm1d(1000)).to(dtype)
        self.optimizer = torch.optim.AdamW(self.module.parameters())
        for parameter in self.module.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def tensor(self, place: str) -> torch.Tensor:
        weight = self.module.get_parameter("0.weight")
        moments: torch.Tensor = self.optimizer.state[weight]["exp_avg_sq"]
        return {"parameter": weight.data, "buffer": self.module.get_buffer("1.running_var"), "moment": moments}[place]

    def components(self, **options: Any) -> list[StateComponent]:
        return [
            StateComponent("model", self.module, REPLICATED, **options),
            StateComponent("optimizer", self.optimizer, REPLICATED, **options),
        ]


def change_one_element(tensor: torch.Tensor) -> None:
    """Change one element by the smallest step of the dtype, at an index that a sample of values would miss."""
    element = tensor.view(-1)[777:778]
    element.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32).add_(1)


def save_with_divergence(output_dir: str, place: str, dtype: torch.dtype, changed_rank: int) -> tuple[Outcome, bool]:
    """Save a good checkpoint, then try to save a diverged state; return the outcome and whether the good one loads."""
    replica = Replica(dtype)
    coordinator = make_coordinator(output_dir, replica.components(validate_replication=True))
    coordinator.save_checkpoint(checkpoint_id=1)
    good = replica.tensor(place).clone()
    if dist.get_rank() == changed_rank:
        change_one_element(replica.tensor(place))
    outcome = raised(lambda: coordinator.save_checkpoint(checkpoint_id=2))
    coordinator.load_checkpoint()
    return outcome, torch.equal(replica.tensor(place), good)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("place", "key", "name"),
    [
        ("parameter", "model", "0.weight"),
        ("buffer", "model", "1.running_var"),
        ("moment", "optimizer", "state.0.weight.exp_avg_sq"),
    ],
)
def test_one_changed_element_on_one_rank_stops_the_save_everywhere(
    tmp_path: Path, place: str, key: str, name: str, dtype: torch.dtype
) -> None:
    results = run_on_ranks(save_with_divergence, 3, str(tmp_path), place, dtype, 1)
    outcomes = {outcome for outcome, _ in results}
    assert len(outcomes) == 1, "the same error on every rank"
    error_type, message = outcomes.pop()
    assert error_type == "ReplicationError"
    assert f"Replication validation failed: the copies of component {key!r} differ between ranks in 1 place" in message
    assert f"{name}: rank 1 differs from ranks 0, 2" in message
    assert entries(tmp_path / "checkpoints") == ["checkpoint-1"], "nothing was written"
    assert [intact for _, intact in results] == [True] * 3


def save_optional_divergence(output_dir: str) -> tuple[list[str], Any]:
    box = Box(values=torch.tensor([1.0, 2.0 + dist.get_rank()]))
    component = StateComponent("average", box, REPLICATED, required=False, validate_replication=True)
    with captured_logs() as lines:
        path = make_coordinator(output_dir, [component]).save_checkpoint(checkpoint_id=1)
    return lines, read_manifest(path).components["average"].metadata


def test_diverged_optional_component_is_saved_and_marked(tmp_path: Path) -> None:
    for lines, metadata in run_on_ranks(save_optional_divergence, 2, str(tmp_path)):
        assert metadata == {"replication": "diverged"}
        assert any("'average'" in line and "values: rank 1 differs from rank 0" in line for line in lines)


def save_diverged_group(output_dir: str, changed_rank: int) -> Outcome:
    mesh, groups = mesh_groups(PERMUTED_MESH)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    box = Box(deep={"moments": [torch.full((2,), float(coordinate[1]))]})
    if dist.get_rank() == changed_rank:
        box.state["deep"]["moments"][0][1] = 9.0
    component = StateComponent("weights", box, PER_GROUP, "dp_group", validate_replication=True)
    return raised(lambda: make_coordinator(output_dir, [component], groups).save_checkpoint(checkpoint_id=1))


# With two ranks, the lower one counts as right.
@pytest.mark.parametrize(("changed", "told"), [(3, "rank 3 differs from rank 2"), (1, "rank 1 differs from rank 0")])
def test_divergence_in_a_group_names_the_rank(tmp_path: Path, changed: int, told: str) -> None:
    outcomes = run_on_ranks(save_diverged_group, 4, str(tmp_path), changed)
    assert len(set(outcomes)) == 1
    error_type, message = outcomes[0]
    assert error_type == "ReplicationError"
    assert "'weights'" in message and f"deep.moments.0: {told}" in message
    assert message.count("differs") == 1, "the other group is not reported"
    assert entries(tmp_path / "checkpoints") == []


def save_undeclared(output_dir: str, validate: bool, level: str) -> Outcome:
    box = Box(value=torch.tensor([float(dist.get_rank())]))
    coordinator = make_coordinator(output_dir, [StateComponent("part", box, REPLICATED, validation_level=level)])
    return raised(lambda: coordinator.save_checkpoint(checkpoint_id=1, validate=validate))


@pytest.mark.parametrize("level", ["quick", "tensor", "full"])
def test_validate_argument_compares_all_replicated_components(tmp_path: Path, level: str) -> None:
    assert run_on_ranks(save_undeclared, 2, str(tmp_path), False, level) == [("", "")] * 2
    first, second = run_on_ranks(save_undeclared, 2, str(tmp_path), True, level)
    assert first == second
    assert first[0] == "ReplicationError" and "'part'" in first[1]
    assert ("largest absolute difference 1" in first[1]) == (level == "full")


def save_reordered(output_dir: str) -> Outcome:
    items = [("a", torch.ones(2)), ("b", {"x": 1, "y": 2}), ("c", torch.zeros(1))]
    if dist.get_rank() == 1:
        items.reverse()
    component = StateComponent("part", Box(**dict(items)), REPLICATED, validate_replication=True)
    return raised(lambda: make_coordinator(output_dir, [component]).save_checkpoint(checkpoint_id=1))


def test_replicas_with_reordered_entries_are_equal(tmp_path: Path) -> None:
    assert run_on_ranks(save_reordered, 2, str(tmp_path)) == [("", "")] * 2
