"""RNG state and data positions at a world size other than the saved one."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from forgather.ml.checkpoint.components import SharingPattern, StateComponent
from forgather.ml.checkpoint.state.rng import RNGState
from tests.support.ranks import run_on_ranks
from tests.support.tiny_parallel import (
    Box,
    Outcome,
    make_coordinator,
    raised,
)

GLOBAL, PER_RANK, REPLICATED = SharingPattern.GLOBAL, SharingPattern.PER_RANK, SharingPattern.REPLICATED


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


def test_known_ranks_restore_rng_state_and_new_ranks_derive_it(tmp_path: Path) -> None:
    saved = run_on_ranks(save_rng, 2, str(tmp_path))
    assert saved[0] != saved[1]
    assert run_on_ranks(load_rng, 2, str(tmp_path)) == saved
    assert run_on_ranks(load_rng, 1, str(tmp_path)) == saved[:1]
    grown = run_on_ranks(load_rng, 3, str(tmp_path))
    assert grown[:2] == saved
    assert grown[2] == derived_draws(2, 8)
    assert grown[2] != derived_draws(2, 9)
    assert run_on_ranks(load_rng, 3, str(tmp_path)) == grown


class Drawing(Box):
    """Draws random numbers while loading, like a data loader that shuffles."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        draws()


def test_rng_state_is_restored_last(tmp_path: Path) -> None:
    components = [rng_component(), StateComponent("dataset", Drawing(value=1), GLOBAL)]
    coordinator = make_coordinator(str(tmp_path), components)
    coordinator.save_checkpoint(checkpoint_id=1)
    expected = draws()
    coordinator.load_checkpoint()
    assert draws() == expected


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
def test_per_rank_data_positions_are_rejected_at_another_world_size(
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


def test_per_rank_data_positions_load_at_the_same_world_size(tmp_path: Path) -> None:
    run_on_ranks(save_dataset, 2, str(tmp_path), PER_RANK)
    results = run_on_ranks(load_dataset, 2, str(tmp_path), PER_RANK, [])
    assert [dataset["position"] for _, dataset, _ in results] == [100, 101]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_global_data_position_loads_at_any_world_size(tmp_path: Path, world_size: int) -> None:
    run_on_ranks(save_dataset, 2, str(tmp_path), GLOBAL)
    results = run_on_ranks(load_dataset, world_size, str(tmp_path), GLOBAL, [])
    assert results == [(("", ""), {"position": 100}, {"step": 3})] * world_size
