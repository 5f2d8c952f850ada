"""PER_NODE state, and checkpoints on node-local storage; two torchrun agents act as nodes."""

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from forgather.ml.checkpoint.components import SharingPattern, StateComponent
from forgather.ml.checkpoint.manifest import read_manifest
from forgather.ml.distributed import DistributedEnvironment
from tests.support.rank_stacks import register
from tests.support.ranks import run_on_ranks
from tests.support.tiny_parallel import (
    LONG_PIPELINE,
    SAVED_SEED,
    SINGLE,
    Box,
    TinyTrainer,
    entries,
    file_names,
    make_coordinator,
    raised,
    reference,
)
from tests.support.warm_torchrun import run_warm_torchrun

NUM_NODES = 2
RANKS_PER_NODE = 2

Results = list[dict[str, Any]]


def components(fresh: bool = False) -> list[StateComponent]:
    """Return components with values that identify their owner, or with unset values if `fresh`."""
    rank, node = dist.get_rank(), dist.get_rank() // RANKS_PER_NODE
    values = [-1] * 4 if fresh else [node, rank, 7, 100 + rank]
    return [
        # Only the first rank of a node provides the state. The value of the other rank must not be saved.
        StateComponent(
            "cache", Box(value=values[0] if rank % RANKS_PER_NODE == 0 else "wrong"), SharingPattern.PER_NODE
        ),
        StateComponent("own", Box(value=values[1]), SharingPattern.PER_RANK),
        StateComponent("copy", Box(value=values[2]), SharingPattern.REPLICATED, validate_replication=not fresh),
        StateComponent("one", Box(value=torch.tensor([values[3]])), SharingPattern.GLOBAL),
    ]


def values_of(loaded: list[StateComponent]) -> dict[str, Any]:
    return {component.key: component.stateful.state["value"] for component in loaded}


def save_and_load(output_dir: str, **options: Any) -> dict[str, Any]:
    path = make_coordinator(output_dir, components(), **options).save_checkpoint(checkpoint_id=4)
    loaded = components(fresh=True)
    make_coordinator(output_dir, loaded, **options).load_checkpoint()
    return {"path": path, "loaded": values_of(loaded)}


def save_and_load_model(output_dir: str, **options: Any) -> Any:
    """Save and load a model that only rank 0 has trained."""
    trainer = TinyTrainer(SINGLE, tied=True, seed=SAVED_SEED if dist.get_rank() == 0 else 1)
    if dist.get_rank() == 0:
        trainer.train()
    trainer.coordinator(output_dir, **options).save_checkpoint(checkpoint_id=6)
    loaded = TinyTrainer(SINGLE, tied=True, seed=2)
    loaded.coordinator(output_dir, **options).load_checkpoint()
    return loaded.memory()


def save_and_load_pipeline(output_dir: str, tied: bool, **options: Any) -> Any:
    """Save and load a pipeline with stages on different nodes."""
    trainer = TinyTrainer(LONG_PIPELINE, tied, seed=SAVED_SEED)
    trainer.train()
    trainer.coordinator(output_dir, **options).save_checkpoint(checkpoint_id=8)
    loaded = TinyTrainer(LONG_PIPELINE, tied, seed=2)
    outcome = raised(lambda: loaded.coordinator(output_dir, **options).load_checkpoint())
    return outcome, loaded.memory()


def save_into_one_directory(output_dir: str, **options: Any) -> tuple[str, str]:
    coordinator = make_coordinator(output_dir, components(), **options)
    return raised(lambda: coordinator.save_checkpoint(checkpoint_id=4))


def run_rank(directory: str) -> None:
    """Run all scenarios on this rank, and write the results to a file per rank."""
    register()
    DistributedEnvironment(backend="gloo", log_level="ERROR")
    rank, node = dist.get_rank(), dist.get_rank() // RANKS_PER_NODE
    node_dir = os.path.join(directory, f"node{node}")
    results = {
        "shared": save_and_load(os.path.join(directory, "shared")),
        "each node": save_and_load(os.path.join(node_dir, "state"), storage_scope="node"),
        "other leader": save_and_load(os.path.join(node_dir, "leader"), storage_scope="node", save_on_local_rank=1),
        "each rank": save_and_load(os.path.join(directory, f"rank{rank}"), storage_scope="rank"),
        "model": save_and_load_model(os.path.join(node_dir, "model"), storage_scope="node"),
        "pipeline": save_and_load_pipeline(os.path.join(node_dir, "pipeline"), False, storage_scope="node"),
        "tied pipeline": save_and_load_pipeline(os.path.join(node_dir, "tied"), True, storage_scope="node"),
        "one directory": save_into_one_directory(os.path.join(directory, "mistake"), storage_scope="node"),
        "one directory, other leader": save_into_one_directory(
            os.path.join(directory, "mistake"), storage_scope="node", save_on_local_rank=1
        ),
    }
    Path(directory, f"results{rank}.pickle").write_bytes(pickle.dumps(results))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nodes")


@pytest.fixture(scope="module")
def results(directory: Path) -> Results:
    """Results of the four ranks. One job runs all scenarios, because starting two agents takes seconds."""
    agents = run_warm_torchrun(__name__, {"job": [str(directory)]}, RANKS_PER_NODE, NUM_NODES)["job"].agents
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(agent.output for agent in agents)
    return [pickle.loads((directory / f"results{rank}.pickle").read_bytes()) for rank in range(4)]


def test_each_node_gets_its_own_state_back(results: Results) -> None:
    for rank, result in enumerate(results):
        assert result["shared"]["loaded"] == {"cache": rank // 2, "own": rank, "copy": 7, "one": torch.tensor([100])}


def test_first_rank_of_a_node_writes_its_state(results: Results) -> None:
    path = results[0]["shared"]["path"]
    assert {name for name in file_names(path) if name.startswith("cache")} == {
        "cache_state_node_0.pt",
        "cache_state_node_1.pt",
    }
    manifest = read_manifest(path)
    assert manifest.num_nodes == 2
    assert manifest.components["cache"].ranks == [0, 2]
    assert [record.owner_ranks for record in manifest.component_files("cache")] == [[0, 1], [2, 3]]


def load_on_one_node(path: str) -> tuple[str, str]:
    loaded = [component for component in components(fresh=True) if component.key == "cache"]
    return raised(lambda: make_coordinator("unused", loaded).load_checkpoint(path))


def test_per_node_state_of_two_nodes_is_rejected_on_one_node(results: Results) -> None:
    outcomes = run_on_ranks(load_on_one_node, 4, results[0]["shared"]["path"])
    assert len(set(outcomes)) == 1
    assert outcomes[0][0] == "CheckpointLoadError"
    assert "skip_checkpoint_components=['cache']" in outcomes[0][1]


@pytest.mark.parametrize("storage", ["each node", "other leader"])
def test_each_node_has_a_complete_checkpoint_for_its_ranks(results: Results, storage: str) -> None:
    for rank, result in enumerate(results):
        node = rank // 2
        loaded = result[storage]["loaded"]
        assert loaded == {"cache": node, "own": rank, "copy": 7, "one": torch.tensor([100])}
        path = result[storage]["path"]
        assert f"node{node}" in path
        assert file_names(path) == {
            f"cache_state_node_{node}.pt",
            f"own_state_rank_{2 * node}.pt",
            f"own_state_rank_{2 * node + 1}.pt",
            "copy_state.pt",
            "one_state.pt",
        }
        writers = {record.writer_rank for record in read_manifest(path).files}
        assert writers == {2 * node, 2 * node + 1}, "no rank writes into another node's directory"


def test_node_checkpoints_of_one_save_share_an_attempt_id(results: Results) -> None:
    attempts = {read_manifest(result["each node"]["path"]).attempt for result in results}
    assert len(attempts) == 1 and None not in attempts


def test_each_rank_can_have_its_own_storage(results: Results) -> None:
    for rank, result in enumerate(results):
        assert result["each rank"]["loaded"] == {"cache": rank // 2, "own": rank, "copy": 7, "one": torch.tensor([100])}
        assert file_names(result["each rank"]["path"]) == {
            f"cache_state_node_{rank // 2}.pt",
            f"own_state_rank_{rank}.pt",
            "copy_state.pt",
            "one_state.pt",
        }


def test_model_of_rank_0_reaches_the_storage_of_every_node(results: Results, directory: Path) -> None:
    expected = reference(tied=True)
    for result in results:
        for name, entries_found in result["model"].items():
            for key, tensor in entries_found.items():
                assert torch.equal(tensor, expected[name][key]), f"{key} of {name}"
        assert "exp_avg" in result["model"]["layers.0.weight"]
    checkpoint = directory / "node1" / "model" / "checkpoints" / "checkpoint-6"
    assert {"model.safetensors", "optimizer_state.pt"} <= file_names(str(checkpoint))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_each_node_has_the_stages_of_its_ranks(results: Results, tied: bool) -> None:
    expected = reference(tied)
    for result in results:
        outcome, memory = result["tied pipeline" if tied else "pipeline"]
        assert outcome == ("", "")
        for name, entries_found in memory.items():
            assert set(entries_found) == set(expected[name])
            for key, tensor in entries_found.items():
                assert torch.equal(tensor, expected[name][key]), f"{key} of {name}"


@pytest.mark.parametrize("case", ["one directory", "one directory, other leader"])
def test_shared_directory_with_node_storage_is_rejected(results: Results, directory: Path, case: str) -> None:
    outcomes = {result[case] for result in results}
    assert len(outcomes) == 1, "the same error everywhere"
    error_type, message = outcomes.pop()
    assert error_type == "CheckpointSaveError"
    assert "shared by several nodes" in message and "save_on_each_node" in message
    assert entries(directory / "mistake" / "checkpoints") == [], "nothing is left"


if __name__ == "__main__":
    run_rank(sys.argv[1])
