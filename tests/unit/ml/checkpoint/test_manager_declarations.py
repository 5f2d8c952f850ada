"""Components that a state provider declares to CheckpointManager, and when the manager requests them."""

import logging
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from forgather.ml.checkpoint.components import SharingPattern, StateComponent
from forgather.ml.checkpoint.errors import CheckpointLoadError, CheckpointSaveError
from forgather.ml.checkpoint.files.state_files import read_state
from forgather.ml.checkpoint.manager import CheckpointConfig, CheckpointManager, RNGState
from forgather.ml.checkpoint.manifest import read_manifest
from forgather.ml.distributed import from_env
from forgather.ml.optim.multiopt import Multiopt
from forgather.ml.sharded_checkpoint import load_checkpoint
from tests.support.ranks import run_on_ranks
from tests.support.tiny_parallel import Box, Outcome, captured_logs, entries, file_names, raised

GLOBAL, PER_RANK, REPLICATED = SharingPattern.GLOBAL, SharingPattern.PER_RANK, SharingPattern.REPLICATED

Make = Callable[..., CheckpointManager]


class Provider:
    """Provider of the given components."""

    def __init__(self, *components: StateComponent) -> None:
        self.components: Sequence[StateComponent] = components

    def get_state_components(self) -> Sequence[StateComponent]:
        return self.components


def manager_for(output_dir: Path | str, provider: object, model: nn.Module | None, **options: Any) -> CheckpointManager:
    config = CheckpointConfig(
        output_dir=str(output_dir),
        save_total_limit=None,
        **{key: options.pop(key) for key in list(options) if key in SAVE},
    )
    return CheckpointManager(config, from_env(), provider, model, **options)


SAVE = ("save_on_all_ranks", "save_on_each_node")


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    managers: list[CheckpointManager] = []

    def made(provider: object, model: nn.Module | None = None, **options: Any) -> CheckpointManager:
        managers.append(manager_for(tmp_path, provider, model, **options))
        return managers[-1]

    yield made
    for manager in managers:
        manager.close()


def linear(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(3, 2)


class TestModelThatIsNotDeclared:
    def test_weights_of_undeclared_model_are_saved_and_loaded(self, make: Make) -> None:
        model, other, box = linear(0), linear(1), Box(value=1)
        path = make(Provider(StateComponent("box", box, GLOBAL)), model).save_checkpoint(checkpoint_id=1)
        manifest = read_manifest(path)
        assert list(manifest.components) == ["model", "box"] and manifest.weights == "included"
        make(Provider(StateComponent("box", box, GLOBAL)), other).load_checkpoint()
        assert torch.equal(other.weight, model.weight) and torch.equal(other.bias, model.bias)

    def test_checkpoint_components_can_exclude_the_model(self, make: Make) -> None:
        provider = Provider(StateComponent("box", Box(value=1), GLOBAL))
        path = make(provider, linear(0), checkpoint_components=["box"]).save_checkpoint(checkpoint_id=1)
        assert list(read_manifest(path).components) == ["box"] and read_manifest(path).weights == "external"
        chosen = make(provider, linear(0), checkpoint_components=["model"]).save_checkpoint(checkpoint_id=2)
        assert list(read_manifest(chosen).components) == ["model"]

    def test_active_state_components_can_exclude_the_model(self, make: Make) -> None:
        class Selective(Provider):
            def get_active_state_components(self) -> list[StateComponent]:
                return [component for component in self.components if component.key != "model"]

        model = linear(0)
        provider = Selective(StateComponent("model", model, GLOBAL), StateComponent("box", Box(value=1), GLOBAL))
        path = make(provider, model).save_checkpoint(checkpoint_id=1)
        assert list(read_manifest(path).components) == ["box"]

    def test_model_parts_are_saved_without_the_full_model(self, make: Make) -> None:
        parts = [nn.ModuleDict({"0": linear(0)}), nn.ModuleDict({"1": linear(1)})]
        path = make(Provider(), None, model_parts=parts).save_checkpoint(checkpoint_id=1)
        stored = load_checkpoint(path)
        assert stored is not None and sorted(stored) == ["0.bias", "0.weight", "1.bias", "1.weight"]


def save_and_load_on_ranks(output_dir: str) -> tuple[list[str], bool]:
    model = linear(0)
    manager = manager_for(output_dir, Provider(StateComponent("box", Box(value=1), REPLICATED)), model)
    path = manager.save_checkpoint(checkpoint_id=1)
    expected = model.weight.clone()
    with torch.no_grad():
        model.weight.zero_()
    manager.load_checkpoint()
    manager.close()
    return sorted(file_names(path)), torch.equal(model.weight, expected)


def test_undeclared_model_is_replicated_on_every_rank(tmp_path: Path) -> None:
    files = ["box_state.pt", "checkpoint_metadata.json", "model.safetensors"]
    assert run_on_ranks(save_and_load_on_ranks, 2, str(tmp_path)) == [(files, True)] * 2


def save_stages_that_are_not_declared(output_dir: str) -> Outcome:
    stage = nn.ModuleDict({str(dist.get_rank()): linear(0)})
    manager = manager_for(output_dir, Provider(StateComponent("box", Box(value=1), REPLICATED)), stage)
    outcome = raised(lambda: manager.save_checkpoint(checkpoint_id=1))
    manager.close()
    return outcome


def test_undeclared_pipeline_stages_are_not_taken_for_replicas(tmp_path: Path) -> None:
    outcomes = run_on_ranks(save_stages_that_are_not_declared, 2, str(tmp_path))
    assert outcomes[0] == outcomes[1] and outcomes[0][0] == "CheckpointSaveError"
    assert "Component 'model' is declared REPLICATED" in outcomes[0][1] and "0.weight only on rank 0" in outcomes[0][1]


class TestWhenComponentsAreAskedFor:
    def test_components_are_requested_at_every_save_and_load(self, make: Make) -> None:
        provider = Provider(StateComponent("box", Box(value=1), GLOBAL))
        manager = make(provider)
        first = manager.save_checkpoint(checkpoint_id=1)
        provider.components = [
            StateComponent("box", Box(value=2), GLOBAL),
            StateComponent("more", Box(value=3), GLOBAL),
        ]
        second = manager.save_checkpoint(checkpoint_id=2)
        assert list(read_manifest(first).components) == ["box"]
        assert list(read_manifest(second).components) == ["box", "more"]
        fresh = Box(value=None)
        provider.components = [StateComponent("box", fresh, GLOBAL)]
        manager.load_checkpoint(second)
        assert fresh.state == {"value": 2}
        manager.load_checkpoint(first)
        assert fresh.state == {"value": 1}

    def test_coordinator_is_reused_with_the_current_components(self, make: Make) -> None:
        provider = Provider(StateComponent("box", Box(value=1), GLOBAL))
        manager = make(provider)
        assert manager.coordinator is manager.coordinator
        assert manager.coordinator.component_keys == ["box"]
        provider.components = [StateComponent("other", Box(value=1), GLOBAL)]
        assert manager.coordinator.component_keys == ["other"]


def groups_that_change(output_dir: str) -> list[list[str]]:
    """Save twice, with process groups that change in between."""

    class Grouped(Provider):
        groups: ClassVar[dict[str, Any]] = {}

        def get_process_groups(self) -> dict[str, Any]:
            return self.groups

    provider = Grouped(StateComponent("box", Box(value=1), SharingPattern.PER_GROUP, "family"))
    manager = manager_for(output_dir, provider, None)
    files = []
    for step, size in enumerate((2, 1)):
        Grouped.groups = {"family": dist.new_subgroups(size)[0]}
        files.append(sorted(file_names(manager.save_checkpoint(checkpoint_id=step))))
    manager.close()
    return files


def test_process_groups_are_requested_at_every_save(tmp_path: Path) -> None:
    first, second = run_on_ranks(groups_that_change, 2, str(tmp_path))[0]
    assert [name for name in first if name.startswith("box")] == ["box_state_group_family_0.pt"]
    assert [name for name in second if name.startswith("box")] == [
        "box_state_group_family_0.pt",
        "box_state_group_family_1.pt",
    ]


class TestObjectsWithoutState:
    @pytest.mark.parametrize("stateful", [None, object(), [1, 2]], ids=["none", "object", "list"])
    def test_optional_stateless_objects_are_skipped(
        self, make: Make, stateful: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        components = [
            StateComponent("box", Box(value=1), GLOBAL),
            StateComponent("dataset", stateful, GLOBAL, required=False),
        ]
        with caplog.at_level(logging.DEBUG, logger="forgather"):
            path = make(Provider(*components)).save_checkpoint(checkpoint_id=1)
        assert list(read_manifest(path).components) == ["box"]
        assert "'dataset' is skipped" in caplog.text
        # Settings may still name them.
        make(Provider(*components), skip_checkpoint_components=["dataset"]).load_checkpoint()

    @pytest.mark.parametrize(
        ("stateful", "text"), [(None, "None"), (object(), "of type object"), ([1], "of type list")]
    )
    def test_required_stateless_objects_are_rejected_by_name(self, make: Make, stateful: Any, text: str) -> None:
        with pytest.raises(ValueError, match=rf"component 'dataset'.*{text}"):
            make(Provider(StateComponent("dataset", stateful, GLOBAL))).save_checkpoint(checkpoint_id=1)


def components_of_some_ranks(output_dir: str) -> tuple[Any, Any, list[str]]:
    """Save and load components that exist on one rank each; no rank waits for another."""
    rank = dist.get_rank()
    own = Box(value=rank)
    provider = Provider(
        StateComponent("first", own if rank == 0 else None, PER_RANK, required=False),
        StateComponent("second", own if rank == 1 else None, PER_RANK, required=False),
    )
    manager = manager_for(output_dir, provider, None)
    path = manager.save_checkpoint(checkpoint_id=1)
    own.state = {}
    manager.load_checkpoint()
    manager.close()
    return rank, own.state, sorted(read_manifest(path).components)


def test_ranks_may_have_different_components(tmp_path: Path) -> None:
    assert run_on_ranks(components_of_some_ranks, 2, str(tmp_path)) == [
        (rank, {"value": rank}, ["first", "second"]) for rank in range(2)
    ]


class TestListOfModules:
    def test_list_of_modules_is_saved_as_one_model(self, make: Make) -> None:
        parts = [nn.ModuleDict({"0": linear(0)}), nn.ModuleDict({"1": linear(1)})]
        optimizer = torch.optim.AdamW([parameter for part in parts for parameter in part.parameters()])
        for part in parts:
            part[next(iter(part))].weight.sum().backward()
        optimizer.step()
        components = [StateComponent("model", parts, GLOBAL), StateComponent("optimizer", optimizer, GLOBAL)]
        path = make(Provider(*components)).save_checkpoint(checkpoint_id=1)
        whole = nn.Sequential(nn.Linear(3, 2), nn.Linear(3, 2))
        load_checkpoint(path, whole)
        assert all(torch.equal(whole[i].weight, parts[i][str(i)].weight) for i in range(2))
        state = read_state(f"{path}/optimizer_state.pt")
        assert sorted(state["state"]) == ["0.weight", "1.weight"]
        before = [part[str(i)].weight.clone() for i, part in enumerate(parts)]
        with torch.no_grad():
            for part in parts:
                part[next(iter(part))].weight.zero_()
        make(Provider(*components)).load_checkpoint()
        assert all(torch.equal(parts[i][str(i)].weight, before[i]) for i in range(2))

    def test_shared_tensor_may_have_one_name_in_two_modules(self, make: Make) -> None:
        shared = linear(0)
        parts = (nn.ModuleDict({"a": shared}), nn.ModuleDict({"a": shared, "b": linear(1)}))
        path = make(Provider(StateComponent("model", parts, GLOBAL))).save_checkpoint(checkpoint_id=1)
        stored = load_checkpoint(path)
        assert stored is not None and sorted(stored) == ["a.bias", "a.weight", "b.bias", "b.weight"]

    def test_two_tensors_with_one_name_are_rejected(self, make: Make, tmp_path: Path) -> None:
        parts = [nn.ModuleDict({"a": linear(0)}), nn.ModuleDict({"a": linear(1)})]
        with pytest.raises(CheckpointSaveError, match=r"'model'.*a\.weight"):
            make(Provider(StateComponent("model", parts, GLOBAL))).save_checkpoint(checkpoint_id=1)
        assert entries(tmp_path / "checkpoints") == []

    def test_declared_model_wins_over_the_argument(self, make: Make) -> None:
        declared, given = linear(0), linear(1)
        path = make(Provider(StateComponent("model", declared, GLOBAL)), given).save_checkpoint(checkpoint_id=1)
        stored = load_checkpoint(path)
        assert stored is not None and torch.equal(stored["weight"], declared.weight)


class Drawing(Box):
    """Draws random numbers while loading, as building a data iterator does."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        torch.rand(3)
        random.random()


@pytest.mark.parametrize("key", ["rng", "generators", "a_first"])
def test_rng_state_is_applied_last_for_any_key(make: Make, key: str) -> None:
    class Fresh(Provider):
        def get_state_components(self) -> list[StateComponent]:
            return [StateComponent(key, RNGState(), PER_RANK), StateComponent("data", Drawing(value=1), GLOBAL)]

    manager = make(Fresh())
    manager.save_checkpoint(checkpoint_id=1)
    expected = torch.rand(3), random.random()
    manager.load_checkpoint()
    assert torch.equal(torch.rand(3), expected[0]) and random.random() == expected[1]
    # Callers that build data iterators after the load apply it again.
    assert manager.random_state is not None
    manager.random_state.restore()
    assert torch.equal(torch.rand(3), expected[0]) and random.random() == expected[1]


class TestOptimizers:
    def trained(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    def check(self, make: Make, declared: Any, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        provider = Provider(StateComponent("model", declared, GLOBAL), StateComponent("optimizer", optimizer, GLOBAL))
        self.trained(model, optimizer)
        path = make(provider, declared).save_checkpoint(checkpoint_id=1)
        assert sorted(read_state(f"{path}/optimizer_state.pt")["state"]) == ["bias", "weight"]
        before = [optimizer.state[parameter]["exp_avg"].clone() for parameter in model.parameters()]
        self.trained(model, optimizer)
        make(provider, declared).load_checkpoint()
        after = [optimizer.state[parameter]["exp_avg"] for parameter in model.parameters()]
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))

    def test_multiopt_state_is_stored_by_name(self, make: Make) -> None:
        model = linear(0)
        parts = [torch.optim.AdamW([model.weight]), torch.optim.AdamW([model.bias], lr=0.1)]
        self.check(make, model, Multiopt(parts), model)

    def test_optimizer_of_compiled_model_has_names_without_prefix(self, make: Make) -> None:
        model = linear(0)
        compiled = torch.compile(model, backend="eager")
        self.check(make, compiled, torch.optim.AdamW(compiled.parameters()), model)


def optimizer_of_ddp(output_dir: str) -> list[str]:
    model = DistributedDataParallel(torch.compile(linear(0), backend="eager"))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    provider = Provider(StateComponent("optimizer", optimizer, REPLICATED, validate_replication=True))
    manager = manager_for(output_dir, provider, model)
    path = manager.save_checkpoint(checkpoint_id=1)
    manager.load_checkpoint()
    manager.close()
    stored = load_checkpoint(path)
    assert stored is not None
    return [*sorted(stored), *sorted(read_state(f"{path}/optimizer_state.pt")["state"])]


def test_ddp_optimizer_is_stored_by_name(tmp_path: Path) -> None:
    assert run_on_ranks(optimizer_of_ddp, 2, str(tmp_path)) == [["bias", "weight"] * 2] * 2


class TestOlderProviders:
    @pytest.mark.parametrize("methods", [("save", "load"), ("save",), ("load",)], ids="-".join)
    def test_deprecated_providers_work_with_a_warning(self, make: Make, methods: tuple[str, ...]) -> None:
        box, model, other = Box(value=1), linear(0), linear(1)
        statefuls = {"box": box, "scheduler": None}
        provider = SimpleNamespace(**{f"get_statefuls_for_{name}": lambda: statefuls for name in methods})
        with pytest.warns(DeprecationWarning, match="get_state_components"):
            path = make(provider, model).save_checkpoint(checkpoint_id=1)
        assert {key: one.sharing_pattern for key, one in read_manifest(path).components.items()} == {
            "model": "global",
            "box": "global",
        }
        box.state = {}
        with pytest.warns(DeprecationWarning, match="get_state_components"):
            make(provider, other).load_checkpoint()
        assert box.state == {"value": 1} and torch.equal(other.weight, model.weight)


class TestSettableAttributes:
    def test_trainer_attribute_provides_the_step(self, make: Make) -> None:
        manager = make(Provider(StateComponent("box", Box(value=1), GLOBAL)))
        with pytest.raises(ValueError, match="checkpoint_id"):
            manager.save_checkpoint()
        manager.trainer = SimpleNamespace(state=SimpleNamespace(global_step=12))
        assert manager.save_checkpoint().endswith("checkpoint-12")

    def test_preserve_n_best_can_be_changed(self, make: Make, tmp_path: Path) -> None:
        provider = Provider(StateComponent("box", Box(value=1), GLOBAL))
        config = CheckpointConfig(output_dir=str(tmp_path / "limited"), save_total_limit=1)
        manager = CheckpointManager(config, from_env(), provider, None)
        manager.preserve_n_best = 2
        for step, loss in enumerate([0.5, 0.1, 0.3, 0.2, 0.9], start=1):
            path = manager.save_checkpoint(checkpoint_id=step)
            manager.update_best_checkpoints(path, {"loss": loss}, "loss")
        assert [value for _, value in manager.best_checkpoints] == [0.1, 0.2]
        assert entries(tmp_path / "limited" / "checkpoints") == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]
        manager.preserve_n_best = 1
        manager.save_checkpoint(checkpoint_id=6)
        assert entries(tmp_path / "limited" / "checkpoints") == ["checkpoint-2", "checkpoint-6"]
        with pytest.raises(ValueError, match="preserve_n_best=-1"):
            manager.preserve_n_best = -1
        manager.close()


def save_on_all_ranks(directories: list[str]) -> tuple[Outcome, list[str], Any]:
    box = Box(value=dist.get_rank())
    provider = Provider(StateComponent("own", box, PER_RANK), StateComponent("copy", Box(value=7), REPLICATED))
    output_dir = directories[dist.get_rank()]
    made: list[CheckpointManager] = []
    outcome = raised(lambda: made.append(manager_for(output_dir, provider, None, save_on_all_ranks=True)))
    if not made:
        return outcome, entries(output_dir), None
    path = made[0].save_checkpoint(checkpoint_id=1)
    box.state = {}
    made[0].load_checkpoint()
    made[0].close()
    reader = manager_for(output_dir, provider, None, save_on_all_ranks=True, read_only=True)
    box.state = {}
    assert reader.load_checkpoint() == path
    return outcome, sorted(file_names(path)), box.state["value"]


class TestStorage:
    def test_save_on_all_ranks_works_in_a_shared_directory(self, tmp_path: Path) -> None:
        results = run_on_ranks(save_on_all_ranks, 2, [str(tmp_path)] * 2)
        files = ["checkpoint_metadata.json", "copy_state.pt", "own_state_rank_0.pt", "own_state_rank_1.pt"]
        assert results == [(("", ""), files, rank) for rank in range(2)]
        assert [name for name in entries(tmp_path) if "probe" in name] == []

    def test_save_on_all_ranks_works_with_a_directory_per_rank(self, tmp_path: Path) -> None:
        results = run_on_ranks(save_on_all_ranks, 2, [str(tmp_path / str(rank)) for rank in range(2)])
        for rank, result in enumerate(results):
            files = ["checkpoint_metadata.json", "copy_state.pt", f"own_state_rank_{rank}.pt"]
            assert result == (("", ""), files, rank)

    def test_mix_of_shared_and_private_directories_is_rejected(self, tmp_path: Path) -> None:
        directories = [str(tmp_path / name) for name in ("shared", "shared", "own")]
        results = run_on_ranks(save_on_all_ranks, 3, directories)
        assert len({outcome for outcome, _, _ in results}) == 1
        error_type, message = results[0][0]
        assert error_type == "CheckpointError" and "ranks 0, 1 share" in message and "save_on_each_node" in message
        assert entries(tmp_path / "shared") == entries(tmp_path / "own") == [], "the probe is gone"


def provider_that_fails_on_one_rank(output_dir: str) -> Outcome:
    provider = Provider(StateComponent("dataset", None if dist.get_rank() == 1 else Box(value=1), GLOBAL))
    manager = manager_for(output_dir, provider, None)
    outcome = raised(lambda: manager.save_checkpoint(checkpoint_id=1))
    manager.close()
    return outcome


def test_failing_declaration_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    outcomes = run_on_ranks(provider_that_fails_on_one_rank, 2, str(tmp_path))
    assert outcomes[0] == outcomes[1] and "rank 1 failed" in outcomes[0][1] and "'dataset'" in outcomes[0][1]


def model_on_one_rank(output_dir: str) -> Outcome:
    components = [StateComponent("model", linear(0), GLOBAL)] if dist.get_rank() == 0 else []
    manager = manager_for(output_dir, Provider(*components), None)
    outcome = raised(lambda: manager.save_checkpoint(checkpoint_id=1))
    manager.close()
    return outcome


def test_model_missing_on_some_ranks_is_rejected(tmp_path: Path) -> None:
    outcomes = run_on_ranks(model_on_one_rank, 2, str(tmp_path))
    assert outcomes[0] == outcomes[1] and outcomes[0][0] == "CheckpointSaveError"
    assert "'model'" in outcomes[0][1] and "not by rank 1" in outcomes[0][1]


def test_optional_model_may_be_missing_from_a_checkpoint(make: Make) -> None:
    box = StateComponent("box", Box(value=1), GLOBAL)
    path = make(Provider(box)).save_checkpoint(checkpoint_id=1)
    with captured_logs() as lines, warnings.catch_warnings():
        make(Provider(box, StateComponent("model", linear(0), GLOBAL, required=False))).load_checkpoint(path)
    assert any("'model' starts fresh" in line for line in lines)
    with pytest.raises(CheckpointLoadError, match="'model'"):
        make(Provider(box), linear(0)).load_checkpoint(path)
