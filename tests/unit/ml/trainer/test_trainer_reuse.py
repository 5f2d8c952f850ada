"""One trainer object, used repeatedly and in any order."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from forgather.ml.checkpoint.output_lock import LOCK_FILE_NAME
from forgather.ml.trainer.trainer import Trainer, TrainingArguments
from tests.support.tiny_models import (
    Recorder,
    ScalarModel,
    TokenModel,
    quiet_trainer,
    saved_steps,
    scalars,
    token_samples,
    weights,
)


def test_train_evaluate_train(tmp_path: Path) -> None:
    model = ScalarModel(5.0)
    trainer = quiet_trainer(tmp_path, model, scalars(1, 2), learning_rate=1.0)
    assert trainer.train().global_step == 2
    assert model.weight.item() == 2.0
    assert trainer.evaluate(scalars(3))["eval_loss"] == 6.0
    output = trainer.train()
    assert output.global_step == 2
    assert model.weight.item() == -1.0
    assert output.metrics["train_samples"] == 2
    assert trainer.evaluate(scalars(3))["eval_loss"] == -3.0


def test_second_train_resumes_from_its_own_checkpoint(tmp_path: Path) -> None:
    model = ScalarModel(5.0)
    trainer = quiet_trainer(tmp_path, model, scalars(1, 2), learning_rate=1.0, save_strategy="epoch")
    trainer.train()
    recorder = Recorder()
    trainer.add_callback(recorder)
    assert trainer.train().global_step == 2
    assert model.weight.item() == 2.0
    assert recorder.steps("on_step_end") == []
    assert trainer.train(resume_from_checkpoint=False).global_step == 2
    assert recorder.steps("on_step_end") == [1, 2]
    assert model.weight.item() == -1.0


def test_evaluation_before_training_changes_nothing(tmp_path: Path) -> None:
    def run(evaluate_first: bool) -> dict[str, torch.Tensor]:
        trainer = quiet_trainer(
            tmp_path,
            None,
            token_samples(8),
            trainer_options={"model_init": _drawn, "eval_dataset": token_samples(4)},
        )
        if evaluate_first:
            trainer.evaluate()
        trainer.train()
        return weights(trainer.unwrapped_model())

    first, second = run(True), run(False)
    assert all(torch.equal(first[name], second[name]) for name in first)


def _drawn() -> torch.nn.Module:
    """Build a model with weights from the trainer's seeded generator."""
    return TokenModel(seed=int(torch.randint(0, 1000, ())))


def test_save_and_load_without_training(tmp_path: Path) -> None:
    model = ScalarModel(5.0)
    trainer = quiet_trainer(tmp_path, model, scalars(1, 2), learning_rate=1.0)
    path = trainer.save_checkpoint()
    assert saved_steps(tmp_path) == [0]
    trainer.train(resume_from_checkpoint=False)
    assert model.weight.item() == 2.0
    assert trainer.load_checkpoint(path) == path
    assert model.weight.item() == 5.0
    assert trainer.state.global_step == 0


def test_checkpoint_after_training_is_of_the_last_step(tmp_path: Path) -> None:
    model = ScalarModel(5.0)
    trainer = quiet_trainer(tmp_path, model, scalars(1, 2, 3), learning_rate=1.0)
    trainer.train()
    trainer.save_checkpoint()
    assert saved_steps(tmp_path) == [3]
    longer = quiet_trainer(tmp_path, ScalarModel(0.0), scalars(1, 2, 3), learning_rate=1.0, num_train_epochs=2)
    assert longer.train().global_step == 6
    assert longer.model is not None and longer.model.weight.item() == -7.0  # type: ignore[operator]


def is_free_for_others(output_dir: Path) -> bool:
    """Return whether another process could lock the output directory."""
    attempt = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    command = [sys.executable, "-c", attempt, str(output_dir / LOCK_FILE_NAME)]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0


@pytest.mark.parametrize("save_first", [False, True])
def test_output_directory_is_locked_only_during_training(tmp_path: Path, save_first: bool) -> None:
    free: list[bool] = []
    recorder = Recorder(on_step_end=lambda **_: free.append(is_free_for_others(tmp_path)))
    trainer = quiet_trainer(tmp_path, ScalarModel(), scalars(1), recorder)
    if save_first:
        trainer.save_checkpoint()
    trainer.train(resume_from_checkpoint=False)
    assert free == [False]
    assert is_free_for_others(tmp_path)


class Worse:
    """Callback that makes every evaluation worse than the previous ones."""

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, Any], **_: Any) -> None:
        metrics["eval_score"] = -state.global_step


def test_run_started_from_a_foreign_checkpoint_has_its_own_best_model(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "score", "greater_is_better": True}

    def trainer(name: str, max_steps: int, resume: bool | str) -> Trainer:
        options = {"eval_dataset": scalars(1)}
        return quiet_trainer(
            tmp_path / name,
            ScalarModel(),
            scalars(1, 2, 3, 4),
            Worse(),
            trainer_options=options,
            max_steps=max_steps,
            resume_from_checkpoint=resume,
            **settings,
            **best,
        )

    trainer("first", 2, False).train()
    second = trainer("second", 4, str(tmp_path / "first/checkpoints/checkpoint-2"))
    second.train()
    assert second.state.best_model_checkpoint == str(tmp_path / "second/checkpoints/checkpoint-3")
    assert second.state.best_metric == -3
    # A checkpoint of the same directory is not foreign, even through a symlink.
    (tmp_path / "link").symlink_to(tmp_path / "first")
    third = trainer("first", 4, str(tmp_path / "link/checkpoints/checkpoint-2"))
    third.train()
    assert third.state.best_model_checkpoint == str(tmp_path / "first/checkpoints/checkpoint-1")


def test_arguments_of_the_caller_are_not_modified(tmp_path: Path) -> None:
    args = TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        seed=-1,
        save_strategy="no",
        metric_for_best_model="loss",
        per_device_train_batch_size=1,
        lr_scheduler_kwargs={},
    )
    before = copy.deepcopy(args)
    trainer = Trainer(args=args, model=ScalarModel(), train_dataset=scalars(1, 2), default_callbacks=False)
    trainer.args.max_steps = 1
    trainer.train()
    trainer.evaluate(scalars(1))
    assert args == before
    assert vars(args) == vars(before)


def test_dict_of_arguments_is_not_modified(tmp_path: Path) -> None:
    args: dict[str, Any] = {"output_dir": str(tmp_path), "use_cpu": True, "save_strategy": "no", "max_steps": "1"}
    before = dict(args)
    trainer = Trainer(args=args, model=ScalarModel(), train_dataset=scalars(1, 2), default_callbacks=False)
    assert trainer.train().global_step == 1
    assert args == before


def test_train_rejects_unknown_arguments(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"unknown arguments: resume\. It takes only resume_from_checkpoint"):
        quiet_trainer(tmp_path, ScalarModel(), scalars(1)).train(resume=True)


def test_module_modes_are_restored(tmp_path: Path) -> None:
    model = torch.nn.Sequential(TokenModel(), torch.nn.Dropout(0.5))

    class Wrapper(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, input_ids: torch.Tensor) -> Any:
            return self.inner(input_ids)

    wrapper = Wrapper().eval()
    modes: list[tuple[str, bool]] = []

    def note(event: str) -> Any:
        return lambda model, **_: modes.append((event, model.inner[1].training))

    recorder = Recorder(on_step_end=note("step"), on_prediction_step=note("evaluation"))
    quiet_trainer(
        tmp_path,
        wrapper,
        token_samples(2),
        recorder,
        trainer_options={"eval_dataset": token_samples(1)},
        eval_strategy="steps",
        eval_steps=1,
    ).train()
    assert modes == [("step", True), ("evaluation", False)] * 2
    assert not wrapper.training and not wrapper.inner[1].training


def test_loss_fn_is_an_alias_of_compute_loss_func(tmp_path: Path) -> None:
    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return logits.sum() * 0 + 7.0

    for name in ("loss_fn", "compute_loss_func"):
        trainer = quiet_trainer(tmp_path, TokenModel(), token_samples(2), trainer_options={name: loss})
        assert trainer.train().metrics["train_loss"] == 7.0
