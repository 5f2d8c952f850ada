"""Checkpoints move between topologies: each parameter gets its own weights and moments by FQN."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.ranks import run_on_ranks
from tests.support.sampling import sampled_keys
from tests.support.tiny_parallel import (
    HYBRID,
    HYBRID_CUT_ELSEWHERE,
    HYBRID_PERMUTED,
    HYBRID_SWAPPED,
    LEARNING_RATE,
    LONG_PIPELINE,
    NUM_STEPS,
    PIPELINE,
    PIPELINE_CUT_ELSEWHERE,
    PIPELINE_INTERLEAVED,
    PIPELINE_SWAPPED,
    REPLICATED,
    SINGLE,
    Memory,
    Topology,
    load_and_save,
    load_fresh,
    reference,
    save_trained,
)

TOPOLOGIES = {
    "single": SINGLE,
    "replicated": REPLICATED,
    "pipeline": PIPELINE,
    "pipeline cut elsewhere": PIPELINE_CUT_ELSEWHERE,
    "pipeline swapped": PIPELINE_SWAPPED,
    "pipeline interleaved": PIPELINE_INTERLEAVED,
    "long pipeline": LONG_PIPELINE,
    "hybrid": HYBRID,
    "hybrid cut elsewhere": HYBRID_CUT_ELSEWHERE,
    "hybrid swapped": HYBRID_SWAPPED,
    "hybrid permuted": HYBRID_PERMUTED,
}
EVERY_TOPOLOGY = pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
SAMPLE = sampled_keys(TOPOLOGIES, "single", "replicated", "pipeline interleaved", "long pipeline", "hybrid permuted")
SOME_TOPOLOGIES = pytest.mark.parametrize("topology", SAMPLE.values(), ids=SAMPLE)
TIED_OR_NOT = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Function that runs `save_trained` on the ranks of a topology, cached by its arguments."""

    @functools.cache
    def save(origin: Topology, *arguments: bool) -> str:
        output_dir = str(tmp_path_factory.mktemp("saved"))
        return str(run_on_ranks(save_trained, origin.world_size, output_dir, origin, *arguments)[0])

    return save


def assert_moved(path: str, topology: Topology, tied: bool, shuffled: bool = False) -> None:
    """Load on fresh ranks, and compare all their state with a run that was never saved."""
    expected = reference(tied)
    seen: set[str] = set()
    for result in run_on_ranks(load_fresh, topology.world_size, path, topology, tied, shuffled):
        assert_same(result["memory"], expected, tied)
        seen.update(result["memory"])
        assert set(result["rates"]) == {LEARNING_RATE * 0.5**NUM_STEPS}
        assert result["scheduler"] == NUM_STEPS
        assert result["trainer"] == {"step": NUM_STEPS}
        assert result["is_tied"] or topology.num_stages > 1
    assert seen == set(expected), "together the ranks have the full model"


def assert_same(found: Memory, expected: Memory, tied: bool) -> None:
    for name, entries in found.items():
        wanted = expected[name]
        # A name that is tied within this process has no separate moments.
        keys = {"value"} if tied and name == "head.weight" and len(entries) == 1 and "embed.weight" in found else wanted
        assert set(entries) == set(keys), name
        for key, tensor in entries.items():
            assert torch.equal(tensor, wanted[key]), f"{key} of {name}"


def test_reference_parameters_are_all_different() -> None:
    """Otherwise swapped parameters would pass the comparisons of this file."""
    for key in ("value", "exp_avg", "exp_avg_sq"):
        tensors = [entry[key] for entry in reference(tied=False).values() if key in entry]
        assert len({tuple(tensor.flatten().tolist()) for tensor in tensors}) == len(tensors) > 8


@TIED_OR_NOT
@EVERY_TOPOLOGY
def test_hybrid_checkpoint_loads_in_every_topology(saved: Callable[..., str], topology: Topology, tied: bool) -> None:
    assert_moved(saved(HYBRID, tied), topology, tied)


@TIED_OR_NOT
@SOME_TOPOLOGIES
def test_single_process_checkpoint_loads_in_every_topology(tmp_path: Path, topology: Topology, tied: bool) -> None:
    path = save_trained(str(tmp_path), SINGLE, tied)
    assert_moved(path, topology, tied)


@SOME_TOPOLOGIES
def test_pipeline_checkpoint_loads_with_reordered_and_regrouped_parameters(
    saved: Callable[..., str], topology: Topology
) -> None:
    assert_moved(saved(PIPELINE, True), topology, True, shuffled=True)


@pytest.mark.parametrize("origin", [HYBRID_PERMUTED, PIPELINE_INTERLEAVED], ids=["hybrid permuted", "interleaved"])
@SOME_TOPOLOGIES
def test_permuted_and_interleaved_stages_load_in_every_topology(
    saved: Callable[..., str], origin: Topology, topology: Topology
) -> None:
    assert_moved(saved(origin, False), topology, False)


@TIED_OR_NOT
@pytest.mark.parametrize("topology", [SINGLE, LONG_PIPELINE, HYBRID], ids=["single", "long pipeline", "hybrid"])
def test_stages_load_without_an_index_of_the_full_model(
    saved: Callable[..., str], topology: Topology, tied: bool
) -> None:
    assert_moved(saved(HYBRID, tied, False), topology, tied)


@TIED_OR_NOT
def test_chain_of_moves_loses_nothing(saved: Callable[..., str], tmp_path: Path, tied: bool) -> None:
    path = saved(PIPELINE, tied)
    for number, topology in enumerate([SINGLE, REPLICATED, HYBRID, LONG_PIPELINE, SINGLE]):
        output_dir = str(tmp_path / str(number))
        path = run_on_ranks(load_and_save, topology.world_size, path, output_dir, topology, tied)[0]
    assert_moved(path, HYBRID, tied)
