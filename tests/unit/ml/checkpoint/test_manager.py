"""CheckpointManager: retention, resume, component selection, and checkpoint metadata."""

import json
import logging
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.components import SharingPattern, StateComponent
from forgather.ml.checkpoint.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointLoadError,
    CheckpointSaveError,
    OutputDirLockedError,
)
from forgather.ml.checkpoint.files.eval_metrics import load_checkpoint_metrics
from forgather.ml.checkpoint.manager import CheckpointConfig, CheckpointManager, RNGState
from forgather.ml.checkpoint.manifest import read_manifest
from forgather.ml.checkpoint.retention import EveryNSteps, LatestN
from forgather.ml.checkpoint.weights.directories import find_latest_checkpoint, validate_checkpoint
from forgather.ml.distributed import StaticDistributedEnvironment
from tests.support.ranks import run_on_ranks


class Box:
    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Provider:
    def __init__(self) -> None:
        self.model = torch.nn.Linear(2, 2)
        self.box = Box(1)
        self.extra = Box("extra")
        self.state = SimpleNamespace(global_step=0)

    def get_state_components(self) -> list[StateComponent]:
        return [
            StateComponent("model", self.model, SharingPattern.GLOBAL),
            StateComponent("box", self.box, SharingPattern.GLOBAL),
            StateComponent("extra", self.extra, SharingPattern.GLOBAL, required=False),
        ]


class Closing:
    """Factory of managers that the fixture closes."""

    def __init__(self, output_dir: Path) -> None:
        self.output_dir = output_dir
        self.managers: list[CheckpointManager] = []

    def __call__(self, provider: Any = None, limit: int | None = None, **options: Any) -> CheckpointManager:
        provider = provider or Provider()
        config = CheckpointConfig(output_dir=str(self.output_dir), save_total_limit=limit)
        manager = CheckpointManager(
            config, StaticDistributedEnvironment(), provider, getattr(provider, "model", None), **options
        )
        self.managers.append(manager)
        return manager


@pytest.fixture
def make(tmp_path: Path) -> Any:
    closing = Closing(tmp_path)
    yield closing
    for manager in closing.managers:
        manager.close()


def steps(output_dir: Path) -> list[int]:
    return sorted(int(name.split("-")[1]) for name in os.listdir(output_dir / "checkpoints"))


class TestKeeping:
    def test_newest_checkpoints_are_kept(self, tmp_path: Path, make: Closing) -> None:
        manager = make(limit=2)
        for step in (10, 20, 30, 40):
            manager.save_checkpoint(checkpoint_id=step)
        assert steps(tmp_path) == [30, 40]

    @pytest.mark.parametrize("limit", [None, 0])
    def test_no_limit_keeps_all(self, tmp_path: Path, make: Closing, limit: int | None) -> None:
        manager = make(limit=limit)
        for step in range(4):
            manager.save_checkpoint(checkpoint_id=step)
        assert steps(tmp_path) == [0, 1, 2, 3]

    def test_best_checkpoints_are_kept_with_the_newest(self, tmp_path: Path, make: Closing) -> None:
        manager = make(limit=1)
        entered = []
        for step, loss in enumerate([0.5, 0.1, 0.3, 0.2], start=1):
            path = manager.save_checkpoint(checkpoint_id=step)
            entered.append(manager.update_best_checkpoints(path, {"eval_loss": loss}, "loss", None, 2))
        assert entered == [True, True, True, True]
        assert [(store.step_of(path), value) for path, value in manager.best_checkpoints] == [(2, 0.1), (4, 0.2)]
        assert steps(tmp_path) == [2, 4]
        assert "0.1" in manager.get_best_checkpoints_summary()

    def test_best_list_survives_resume_and_moved_directory(self, tmp_path: Path, make: Closing) -> None:
        manager = make(limit=1)
        for step, loss in enumerate([0.0, 0.4], start=1):
            path = manager.save_checkpoint(checkpoint_id=step)
            manager.update_best_checkpoints(path, {"eval_loss": loss}, "loss", None, 1)
        assert store.verify_checkpoint(path) == []
        moved = tmp_path.with_name(f"{tmp_path.name}-moved")
        shutil.move(tmp_path, moved)
        resumed = Closing(moved)(limit=1)
        resumed.load_checkpoint()
        assert resumed.best_checkpoints == [(str(moved / "checkpoints" / "checkpoint-1"), 0.0)]
        resumed.save_checkpoint(checkpoint_id=3)
        assert steps(moved) == [1, 3]
        resumed.close()

    def test_custom_retention_policy_is_used(self, tmp_path: Path, make: Closing) -> None:
        manager = make(retention=LatestN(1) | EveryNSteps(4))
        for step in range(1, 11):
            manager.save_checkpoint(checkpoint_id=step)
        # The manifest's step comes from the checkpoint name. The trainer's step stays 0 here.
        assert steps(tmp_path) == [4, 8, 10]

    def test_global_step_names_the_checkpoint(self, tmp_path: Path, make: Closing) -> None:
        provider = Provider()
        provider.state.global_step = 7
        assert make(provider).save_checkpoint().endswith("checkpoint-7")
        assert read_manifest(str(tmp_path / "checkpoints" / "checkpoint-7")).step == 7


class TestResuming:
    def test_missing_checkpoint_is_a_fresh_start(self, make: Closing) -> None:
        manager = make()
        assert manager.resolve_checkpoint_path() is None
        assert manager.load_checkpoint() is None

    def test_newest_complete_checkpoint_is_loaded(self, tmp_path: Path, make: Closing) -> None:
        provider = Provider()
        manager = make(provider)
        for step in (1, 2):
            provider.box.value = step
            manager.save_checkpoint(checkpoint_id=step)
        provider.box.value = None
        assert manager.resolve_checkpoint_path(False) is None
        assert manager.resolve_checkpoint_path(True) == manager.resolve_checkpoint_path() == manager.load_checkpoint()
        assert provider.box.value == 2
        assert find_latest_checkpoint(str(tmp_path)) == manager.resolve_checkpoint_path()

    def test_damaged_checkpoint_falls_back_to_older_with_a_warning(
        self, tmp_path: Path, make: Closing, caplog: pytest.LogCaptureFixture
    ) -> None:
        provider = Provider()
        manager = make(provider)
        for step in (1, 2):
            provider.box.value = step
            manager.save_checkpoint(checkpoint_id=step)
        damaged = tmp_path / "checkpoints" / "checkpoint-2" / "box_state.pt"
        content = bytearray(damaged.read_bytes())
        content[len(content) // 2] ^= 1
        damaged.write_bytes(content)
        with caplog.at_level(logging.WARNING):
            assert manager.load_checkpoint() == str(tmp_path / "checkpoints" / "checkpoint-1")
        assert provider.box.value == 1
        assert "falling back" in caplog.text and "box_state.pt" in caplog.text
        with pytest.raises(CheckpointCorruptError, match=r"box_state\.pt.*expected"):
            manager.load_checkpoint(str(tmp_path / "checkpoints" / "checkpoint-2"))

    def test_resume_raises_when_all_checkpoints_are_damaged(self, tmp_path: Path, make: Closing) -> None:
        manager = make()
        path = Path(manager.save_checkpoint(checkpoint_id=1))
        content = bytearray((path / "box_state.pt").read_bytes())
        content[-1] ^= 1
        (path / "box_state.pt").write_bytes(content)
        with pytest.raises(CheckpointCorruptError):
            manager.load_checkpoint()

    def test_path_that_is_not_a_directory_is_an_error(self, tmp_path: Path, make: Closing) -> None:
        manager = make()
        for load in (manager.load_checkpoint, manager.resolve_checkpoint_path):
            with pytest.raises(CheckpointError, match="no such directory"):
                load(str(tmp_path / "nowhere"))
        (tmp_path / "file").write_text("")
        with pytest.raises(CheckpointError, match="a file, not a checkpoint directory"):
            manager.load_checkpoint(str(tmp_path / "file"))

    def test_component_can_be_skipped_or_its_file_removed(
        self, tmp_path: Path, make: Closing, caplog: pytest.LogCaptureFixture
    ) -> None:
        provider = Provider()
        path = Path(make(provider).save_checkpoint(checkpoint_id=1))
        provider.box.value, provider.extra.value = "kept", "kept"
        (path / "extra_state.pt").unlink()
        assert validate_checkpoint(str(path))
        with caplog.at_level(logging.WARNING):
            make(provider, skip_checkpoint_components=["box"]).load_checkpoint()
        assert (provider.box.value, provider.extra.value) == ("kept", "kept")
        assert "extra_state.pt" in caplog.text
        with pytest.raises(ValueError, match=r"skip_checkpoint_components.*'bx'.*Did you mean 'box'"):
            make(provider, skip_checkpoint_components=["bx"]).load_checkpoint()

    def test_temporary_directory_of_a_killed_job_is_removed_at_start(self, tmp_path: Path, make: Closing) -> None:
        make().save_checkpoint(checkpoint_id=1)
        (tmp_path / "checkpoints" / ".tmp-checkpoint-2-0123456789ab").mkdir()
        make()
        assert os.listdir(tmp_path / "checkpoints") == ["checkpoint-1"]


class TestSelecting:
    def test_unknown_components_are_rejected(self, make: Closing) -> None:
        with pytest.raises(ValueError, match="'optimizr'"):
            make(checkpoint_components=["model", "optimizr"]).save_checkpoint(checkpoint_id=1)

    def test_weights_can_be_external(self, tmp_path: Path, make: Closing) -> None:
        calls: list[dict[str, Any]] = []

        class Supplier:
            def on_load_model_weights(self, **event: Any) -> None:
                calls.append(event)

        provider = Provider()
        path = make(provider, checkpoint_components=["box"]).save_checkpoint(checkpoint_id=1)
        assert read_manifest(path).weights == "external"
        assert not list(Path(path).glob("*.safetensors"))
        with pytest.raises(CheckpointLoadError, match="on_load_model_weights"):
            make(provider, checkpoint_components=["box"]).load_checkpoint()
        make(provider, checkpoint_components=["box"], callbacks=[Supplier()]).load_checkpoint()
        assert [call["model"] for call in calls] == [provider.model]


class Callback:
    name = "counter"

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class TestMetadata:
    def test_callback_state_is_restored_by_name(self, make: Closing) -> None:
        callbacks = [Callback(1), Callback({"a": [1.5, None]}), object()]
        path = make(callbacks=callbacks).save_checkpoint(checkpoint_id=1)
        with open(f"{path}/checkpoint_metadata.json") as file:
            assert sorted(json.load(file)["callbacks"]) == ["counter", "counter#2"]
        restored = [Callback(None), Callback(None)]
        make(callbacks=restored).load_checkpoint()
        assert [one.value for one in restored] == [1, {"a": [1.5, None]}]

    @pytest.mark.parametrize("value", [torch.zeros(2), {1: "integer keys"}, lambda: None])
    def test_callback_state_that_json_would_change_is_rejected(self, make: Closing, value: Any) -> None:
        with pytest.raises(CheckpointSaveError, match="counter"):
            make(callbacks=[Callback(value)]).save_checkpoint(checkpoint_id=1)

    def test_eval_metrics_are_saved_in_the_checkpoint(self, make: Closing) -> None:
        manager = make()
        manager.set_eval_metrics({"eval_loss": 0.25})
        first = manager.save_checkpoint(checkpoint_id=1)
        second = manager.save_checkpoint(checkpoint_id=2)
        assert load_checkpoint_metrics(first) == {"eval_loss": 0.25}
        assert load_checkpoint_metrics(second) is None
        assert "eval_metrics.json" in [record.path for record in read_manifest(first).files]


class TestTrouble:
    def test_on_save_error_warn_turns_errors_into_warnings(
        self, make: Closing, caplog: pytest.LogCaptureFixture
    ) -> None:
        provider = Provider()
        provider.box.value = lambda: None
        with pytest.raises(CheckpointSaveError, match=r"box\.value"):
            make(provider).save_checkpoint(checkpoint_id=1)
        manager = make(provider, on_save_error="warn")
        assert manager.save_checkpoint(checkpoint_id=1) == ""
        assert manager.num_save_errors == 1 and "box.value" in caplog.text
        provider.box.value = 1
        assert manager.save_checkpoint(checkpoint_id=2)
        with pytest.raises(ValueError, match="on_save_error"):
            make(on_save_error="ignore")

    def test_read_only_manager_needs_no_lock(self, tmp_path: Path, make: Closing) -> None:
        make().save_checkpoint(checkpoint_id=1)
        pid = os.fork()
        if pid == 0:
            # The parent holds the output lock, so the child can only read.
            code = 1
            try:
                Closing(tmp_path)()
            except OutputDirLockedError:
                code = 0 if Closing(tmp_path)(read_only=True).load_checkpoint() else 2
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def callbacks_on_two_ranks(output_dir: str) -> Any:
    import torch.distributed as dist

    rank = dist.get_rank()
    environment = StaticDistributedEnvironment(rank=rank, local_rank=rank, world_size=2, local_world_size=2)

    def manager(callbacks: list[Any]) -> CheckpointManager:
        config = CheckpointConfig(output_dir=output_dir, save_total_limit=1)
        return CheckpointManager(config, environment, Provider(), None, callbacks=callbacks)

    first = manager([Callback(f"of rank {rank}")] if rank == 1 else [])
    first.save_checkpoint(checkpoint_id=1)
    restored = Callback("untouched")
    second = manager([restored])
    second.load_checkpoint()
    second.close()
    first.close()
    return restored.value


def test_callback_state_is_kept_per_rank(tmp_path: Path) -> None:
    assert run_on_ranks(callbacks_on_two_ranks, 2, str(tmp_path)) == ["untouched", "of rank 1"]


def test_random_sequence_continues_after_load(make: Closing) -> None:
    class WithRandomNumbers(Provider):
        rng = RNGState()

        def get_state_components(self) -> list[StateComponent]:
            return [StateComponent("rng", self.rng, SharingPattern.PER_RANK), *super().get_state_components()]

    manager = make(WithRandomNumbers())
    manager.save_checkpoint(checkpoint_id=1)
    expected = torch.rand(3)
    manager.load_checkpoint()
    assert torch.equal(torch.rand(3), expected)


class TestWrappedModels:
    def test_compiled_model_is_saved_without_name_prefix(self, make: Closing, tmp_path: Path) -> None:
        class Compiled(Provider):
            def __init__(self) -> None:
                super().__init__()
                self.model = torch.compile(torch.nn.Sequential(torch.nn.Linear(2, 2)), backend="eager")  # type: ignore[assignment]

        path = make(Compiled()).save_checkpoint(checkpoint_id=1)
        names = {name for record in read_manifest(path).files for name in record.tensors}
        assert {"0.weight", "0.bias"} <= names

    def test_component_named_model_without_weights_is_saved_as_state(self, make: Closing) -> None:
        class Odd(Provider):
            def get_state_components(self) -> list[StateComponent]:
                return [StateComponent("model", self.box, SharingPattern.GLOBAL)]

        provider = Odd()
        manager = make(provider)
        path = manager.save_checkpoint(checkpoint_id=1)
        assert [record.path for record in read_manifest(path).files if record.component == "model"] == [
            "model_state.pt"
        ]
        provider.box.value = None
        manager.load_checkpoint()
        assert provider.box.value == 1


def test_bare_optimizer_resumes_with_its_saved_options(make: Closing) -> None:
    """The manager sees the optimizer first at save, after a schedule has changed its options."""

    class WithOptimizer(Provider):
        def __init__(self) -> None:
            super().__init__()
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)

        def get_state_components(self) -> list[StateComponent]:
            return [
                StateComponent("model", self.model, SharingPattern.GLOBAL),
                StateComponent("optimizer", self.optimizer, SharingPattern.GLOBAL),
            ]

    provider = WithOptimizer()
    provider.optimizer.param_groups[0]["lr"] = 0.01
    make(provider).save_checkpoint(checkpoint_id=1)
    resumed = WithOptimizer()
    make(resumed).load_checkpoint()
    assert resumed.optimizer.param_groups[0]["lr"] == 0.01


def test_best_list_of_another_run_is_not_loaded(tmp_path: Path) -> None:
    first, second = Closing(tmp_path / "first"), Closing(tmp_path / "second")
    manager = first(limit=1)
    path = manager.save_checkpoint(checkpoint_id=1)
    manager.update_best_checkpoints(path, {"eval_loss": 0.1}, "loss", None, 1)
    other = second(limit=1)
    other.load_checkpoint(path)
    assert other.best_checkpoints == []
    manager.close()
    other.close()


def test_job_without_weights_needs_on_load_model_weights(make: Closing) -> None:
    """Raises even if the checkpoint has weights. Otherwise the model would silently stay random."""
    make().save_checkpoint(checkpoint_id=1)
    with pytest.raises(CheckpointLoadError, match="on_load_model_weights"):
        make(checkpoint_components=["box"]).load_checkpoint()
    make(checkpoint_components=["box", "model"], skip_checkpoint_components=["model"]).load_checkpoint()


def rank_with_bad_metrics(output_dir: str) -> str:
    import torch.distributed as dist

    rank = dist.get_rank()
    environment = StaticDistributedEnvironment(rank=rank, local_rank=rank, world_size=2, local_world_size=2)
    config = CheckpointConfig(output_dir=output_dir, save_total_limit=1)
    manager = CheckpointManager(config, environment, Provider(), None)
    manager.set_eval_metrics({"eval_loss": object()} if rank == 0 else {"eval_loss": 0.5})
    try:
        manager.save_checkpoint(checkpoint_id=1)
    except CheckpointSaveError as error:
        return str(error)
    finally:
        manager.close()
    return ""


def test_unwritable_metrics_on_one_rank_are_an_error_on_all(tmp_path: Path) -> None:
    told = run_on_ranks(rank_with_bad_metrics, 2, str(tmp_path))
    assert told[0] == told[1] and "rank 0 failed" in told[0]
