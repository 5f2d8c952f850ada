"""External weights: checkpoints without the model weights, which a callback stores, still resume bit for bit."""

import functools
import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.checkpoint.manifest import read_manifest
from forgather.ml.trainer.trainer import Trainer
from tests.support.data_parallel import ddp_trainer, run
from tests.support.pipelines import llama, pipeline_trainer, whole_result
from tests.support.ranks import outcomes_on_ranks, run_on_ranks
from tests.support.tiny_models import quiet_trainer, saved_steps, tiny_llama, token_samples, weights

COMPONENTS = ["optimizer", "scheduler", "trainer", "dataset", "rng"]
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "logging_strategy": "steps",
    "logging_steps": 1,
    "lr_scheduler_type": "linear",
    "shuffle": True,
    "max_steps": 8,
}
SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4, "checkpoint_components": COMPONENTS}
OPTIONS: dict[str, Any] = {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 0.01})}


class Shelf:
    """Callback that stores the weights of every checkpoint in a separate directory."""

    def __init__(self, directory: Path, stop_at: int | None = None) -> None:
        self._directory = directory
        self._stop_at = stop_at
        self.supplied: list[str] = []

    def on_save(self, args: Any, state: Any, control: Any, model: nn.Module, checkpoint_path: str, **_: Any) -> None:
        if not dist.is_initialized() or dist.get_rank() == 0:
            self._directory.mkdir(exist_ok=True)
            torch.save(model.state_dict(), self._place_of(checkpoint_path))

    def on_load_model_weights(self, model: nn.Module, checkpoint_path: str, **_: Any) -> None:
        model.load_state_dict(torch.load(self._place_of(checkpoint_path)))
        self.supplied.append(Path(checkpoint_path).name)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = control.should_training_stop or state.global_step == self._stop_at

    def _place_of(self, checkpoint_path: str) -> Path:
        return self._directory / f"{Path(checkpoint_path).name}.pt"


class End(NamedTuple):
    """Results of a run that must be equal bit for bit."""

    weights: dict[str, Tensor]
    moments: dict[int, dict[str, Tensor]]
    losses: list[float]


def end_of(trainer: Trainer) -> End:
    result = run(trainer)
    return End(result.weights, trainer.optimizer.state_dict()["state"], result.losses)


def assert_continues(straight: End, resumed: End) -> None:
    assert len(straight.losses) == 8 and straight.losses[4:] == resumed.losses
    torch.testing.assert_close(resumed[:2], straight[:2], rtol=0.0, atol=0.0)


def trainer_for(output_dir: Path, *callbacks: Any, seed: int = 0, **settings: Any) -> Trainer:
    """Return a trainer; its initial weights depend on the seed, so missing weights are noticed."""
    data, options = token_samples(10), {"eval_dataset": token_samples(4, seed=3), **OPTIONS}
    return quiet_trainer(
        output_dir, tiny_llama(seed), data, *callbacks, trainer_options=options, **{**SETTINGS, **settings}
    )


def digests(directory: Path) -> dict[str, str]:
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_checkpoint_without_weights_records_it_in_the_manifest(tmp_path: Path) -> None:
    trainer_for(tmp_path / "with", max_steps=4, save_strategy="steps", save_steps=4).train()
    trainer_for(tmp_path / "without", Shelf(tmp_path / "shelf"), max_steps=4, **SAVING).train()
    complete, small = (tmp_path / name / "checkpoints/checkpoint-4" for name in ("with", "without"))
    assert "model.safetensors" in digests(complete)
    left_out = digests(complete).keys() - digests(small).keys()
    assert left_out == {name for name in digests(complete) if "model" in name or name.endswith("config.json")}
    assert not any("model" in name or name.endswith((".safetensors", ".bin")) for name in digests(small))
    assert (read_manifest(str(small)).weights, read_manifest(str(complete)).weights) == ("external", "included")
    assert set(read_manifest(str(small)).components) == set(COMPONENTS)


def test_resume_with_supplied_weights_equals_uninterrupted_run(tmp_path: Path) -> None:
    straight = end_of(trainer_for(tmp_path / "straight"))
    trainer_for(tmp_path / "run", Shelf(tmp_path / "shelf", stop_at=4), **SAVING).train()
    shelf = Shelf(tmp_path / "shelf")
    resumed = end_of(trainer_for(tmp_path / "run", shelf, seed=5, **SAVING))
    assert shelf.supplied == ["checkpoint-4"]
    assert_continues(straight, resumed)


def test_resume_without_supplied_weights_fails_and_loses_nothing(tmp_path: Path) -> None:
    straight = end_of(trainer_for(tmp_path / "straight"))
    trainer_for(tmp_path / "run", Shelf(tmp_path / "shelf", stop_at=4), **SAVING).train()
    before = digests(tmp_path / "run/checkpoints")
    # The second settings request all components, as a user does who forgot about the external weights.
    for settings in (SAVING, {"save_strategy": "steps", "save_steps": 4}):
        forgetful = trainer_for(tmp_path / "run", seed=5, **settings)
        with pytest.raises(CheckpointLoadError, match=r"weights.*checkpoint-4.*on_load_model_weights.*skip_checkpoint"):
            forgetful.train()
        assert digests(tmp_path / "run/checkpoints") == before
    resumed = end_of(trainer_for(tmp_path / "run", Shelf(tmp_path / "shelf"), seed=5, **SAVING))
    assert_continues(straight, resumed)


def test_resume_can_skip_external_weights(tmp_path: Path) -> None:
    trainer_for(tmp_path, Shelf(tmp_path / "shelf", stop_at=4), **SAVING).train()
    trainer = trainer_for(tmp_path, seed=5, skip_checkpoint_components=["model"], **SAVING)
    assert trainer.train().global_step == 8
    assert saved_steps(tmp_path) == [4, 8]


def test_resumed_run_can_include_weights_in_checkpoints_again(tmp_path: Path) -> None:
    straight = end_of(trainer_for(tmp_path / "straight"))
    trainer_for(tmp_path / "run", Shelf(tmp_path / "shelf", stop_at=4), **SAVING).train()
    complete = {**SAVING, "checkpoint_components": None}
    assert_continues(straight, end_of(trainer_for(tmp_path / "run", Shelf(tmp_path / "shelf"), seed=5, **complete)))
    assert read_manifest(str(tmp_path / "run/checkpoints/checkpoint-8")).weights == "included"


def test_the_best_weights_are_supplied_at_the_end(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "shelf")
    trainer = trainer_for(tmp_path, shelf, eval_strategy="steps", eval_steps=4, load_best_model_at_end=True, **SAVING)
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    assert shelf.supplied == [best.name]
    torch.testing.assert_close(
        weights(trainer.unwrapped_model()), torch.load(tmp_path / f"shelf/{best.name}.pt"), rtol=0.0, atol=0.0
    )


def test_best_weights_are_supplied_even_if_skipped_at_the_start(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "shelf")
    settings = {"eval_strategy": "steps", "eval_steps": 4, "load_best_model_at_end": True, **SAVING}
    trainer_for(tmp_path, shelf, skip_checkpoint_components=["model"], **settings).train()
    assert len(shelf.supplied) == 1


def test_load_best_model_at_end_needs_supplied_weights(tmp_path: Path) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 4, "load_best_model_at_end": True, **SAVING}
    with pytest.raises(
        ValueError, match=r"load_best_model_at_end=True needs the weights .*Add 'model' or such a callback"
    ):
        trainer_for(tmp_path, **settings).train()
    assert saved_steps(tmp_path) == []


def job(output_dir: str, name: str, stop_at: int | None, has_shelf: bool, seed: int) -> tuple[End, list[str]]:
    """Train on ranks up to a step."""
    shelf = Shelf(Path(output_dir, "shelf"), stop_at)
    trainer = ddp_trainer(
        Path(output_dir, name),
        tiny_llama(seed),
        token_samples(12),
        *([shelf] if has_shelf else []),
        trainer_options=OPTIONS,
        **SETTINGS,
        **(SAVING if name == "run" else {}),
    )
    return end_of(trainer), shelf.supplied


def test_ranks_resume_with_supplied_weights_and_all_fail_without(tmp_path: Path) -> None:
    (straight, _), _ = run_on_ranks(job, 2, str(tmp_path), "straight", None, False, 0)
    run_on_ranks(job, 2, str(tmp_path), "run", 4, True, 0)
    before = digests(tmp_path / "run/checkpoints")
    assert not any(name.endswith(".safetensors") for name in before)
    for outcome in outcomes_on_ranks(job, 2, str(tmp_path), "run", None, False, 5):
        assert outcome.error_type == "CheckpointLoadError" and "on_load_model_weights" in str(outcome.error_message)
    assert digests(tmp_path / "run/checkpoints") == before
    for resumed, supplied in run_on_ranks(job, 2, str(tmp_path), "run", None, True, 5):
        assert supplied == ["checkpoint-4"]
        assert_continues(straight, resumed)


class ShelfOfStages(Shelf):
    """Callback that stores the stages of each rank separately."""

    def __init__(self, directory: Path, stop_at: int | None = None) -> None:
        super().__init__(directory, stop_at)
        self._directory = directory.with_name(f"{directory.name}{dist.get_rank()}")

    def on_save(self, args: Any, state: Any, control: Any, model: nn.Module, checkpoint_path: str, **_: Any) -> None:
        self._directory.mkdir(exist_ok=True)
        torch.save(model.state_dict(), self._place_of(checkpoint_path))

    def on_load_model_weights(self, model_parts: Any, checkpoint_path: str, **_: Any) -> None:  # type: ignore[override]
        (part,) = model_parts
        super().on_load_model_weights(part, checkpoint_path)


def pipeline_job(output_dir: str, name: str, stop_at: int | None, components: list[str] | None) -> Any:
    shelf = ShelfOfStages(Path(output_dir, "shelf"), stop_at)
    settings = {**SETTINGS, **SAVING, "checkpoint_components": components, "per_device_train_batch_size": 4}
    trainer = pipeline_trainer(
        Path(output_dir, name),
        functools.partial(llama, 2),
        token_samples(20),
        shelf,
        trainer_options=OPTIONS,
        **settings,
    )
    return whole_result(trainer), shelf.supplied


@pytest.mark.parametrize("components", [COMPONENTS, None])
def test_pipeline_stages_resume_with_supplied_weights(components: list[str] | None, tmp_path: Path) -> None:
    straight, _ = run_on_ranks(pipeline_job, 2, str(tmp_path), "straight", None, None)[0]
    run_on_ranks(pipeline_job, 2, str(tmp_path), "run", 4, COMPONENTS)
    for resumed, supplied in run_on_ranks(pipeline_job, 2, str(tmp_path), "run", None, components):
        assert supplied == ["checkpoint-4"]
        assert resumed.losses == straight.losses[4:]
        torch.testing.assert_close(resumed.weights, straight.weights, rtol=0.0, atol=0.0)
