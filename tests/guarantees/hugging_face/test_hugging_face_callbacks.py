"""Callbacks written for `transformers.Trainer` run unchanged."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]
from transformers import EarlyStoppingCallback, PrinterCallback, TrainerCallback, TrainerControl, TrainerState
from transformers.integrations import TensorBoardCallback

from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.trainer import Trainer
from tests.support.tiny_models import (
    Recorder,
    ScalarModel,
    quiet_trainer,
    scalars,
    tiny_llama,
    token_samples,
)


def stopping_run(tmp_path: Path, losses: Sequence[float], *callbacks: Any, **settings: Any) -> Trainer:
    """Return a trainer that evaluates at every step with these losses: the weight itself, which starts at 9."""
    values = [before - after for before, after in zip([9.0, *losses], losses, strict=False)]
    defaults: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "learning_rate": 1.0}
    return quiet_trainer(
        tmp_path,
        ScalarModel(9.0),
        scalars(*values),
        *callbacks,
        trainer_options={"eval_dataset": scalars(1)},
        **{**defaults, **settings},
    )


def test_early_stopping_stops_after_its_patience(tmp_path: Path) -> None:
    callback = EarlyStoppingCallback(early_stopping_patience=2)
    output = stopping_run(tmp_path, [5, 4, 6, 3, 4, 5, 1, 1], callback).train()
    assert output.global_step == 6


def test_early_stopping_by_a_metric_that_should_rise(tmp_path: Path) -> None:
    def add_accuracy(metrics: dict[str, Any], **_: Any) -> None:
        metrics["eval_accuracy"] = metrics["eval_loss"]

    trainer = stopping_run(
        tmp_path,
        [1, 2, 3, 2, 1, 0],
        Recorder(on_evaluate=add_accuracy),
        EarlyStoppingCallback(early_stopping_patience=2),
        best_model_metric="accuracy",
    )
    assert trainer.train().global_step == 5
    assert trainer.state.best_metric == 3.0


def test_early_stopping_with_the_best_model_loaded(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"load_best_model_at_end": True, "save_strategy": "steps", "save_steps": 1}
    trainer = stopping_run(tmp_path, [5, 4, 6, 7, 8], EarlyStoppingCallback(2), **settings)
    assert trainer.train().global_step == 4
    assert trainer.evaluate()["eval_loss"] == 4.0


def test_early_stopping_patience_counts_across_a_resume(tmp_path: Path) -> None:
    losses = [5, 4, 6, 7, 8, 9]

    def run(**settings: Any) -> tuple[int, int]:
        callback = EarlyStoppingCallback(early_stopping_patience=3)
        settings = {"save_strategy": "steps", "save_steps": 1, **settings}
        trainer = stopping_run(tmp_path, losses, callback, **settings)
        return trainer.train().global_step, callback.early_stopping_patience_counter

    assert run(max_steps=4) == (4, 2)
    assert run() == (5, 3)


def test_changed_patience_takes_effect_after_a_resume(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
    stopping_run(tmp_path, [5, 6, 7, 8], EarlyStoppingCallback(4), max_steps=2, **settings).train()
    callback = EarlyStoppingCallback(2)
    assert stopping_run(tmp_path, [5, 6, 7, 8], callback, **settings).train().global_step == 3
    assert callback.early_stopping_patience == 2


def test_tensorboard_receives_training_and_evaluation_metrics(tmp_path: Path) -> None:
    samples = token_samples(8)
    trainer = quiet_trainer(
        tmp_path,
        tiny_llama(),
        samples,
        TensorBoardCallback(),
        trainer_options={"eval_dataset": samples},
        per_device_train_batch_size=2,
        logging_strategy="steps",
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=2,
    )
    trainer.train()
    (folder,) = (tmp_path / "runs").iterdir()
    events = EventAccumulator(str(folder))
    events.Reload()

    def scalar(name: str) -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in events.Scalars(name)]

    history = trainer.state.log_history
    losses = [(record["step"], record["loss"]) for record in history if "loss" in record]
    eval_losses = [(record["step"], record["eval_loss"]) for record in history if "eval_loss" in record]
    assert [step for step, _ in losses] == [step for step, _ in eval_losses] == [2, 4]
    for name, expected in (("train/loss", losses), ("eval/loss", eval_losses)):
        assert [step for step, _ in scalar(name)] == [2, 4]
        assert [value for _, value in scalar(name)] == pytest.approx([value for _, value in expected])
    (args,) = events.Tensors("args/text_summary")
    assert json.loads(args.tensor_proto.string_val[0])["logging_steps"] == 2
    assert len(events.Tensors("model_config/text_summary")) == 1


class Ordered(TrainerCallback):
    """Callback that records the order of on_log and on_evaluate."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, list[str]]] = []

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("on_log", sorted(name for name in kwargs["logs"] if "loss" in name)))

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("on_evaluate", sorted(name for name in kwargs["metrics"] if "loss" in name)))


def test_evaluations_are_logged_to_hugging_face_callbacks_only(tmp_path: Path) -> None:
    theirs, ours = Ordered(), Recorder()
    trainer = stopping_run(tmp_path, [5, 4], theirs, ours, logging_strategy="steps", logging_steps=1)
    trainer.train()
    step = [("on_log", ["loss"]), ("on_log", ["eval_loss"]), ("on_evaluate", ["eval_loss"])]
    assert theirs.seen == [*step, *step, ("on_log", ["train_loss"])]
    assert ours.names.count("on_log") == 3
    assert sum("eval_loss" in record for record in trainer.state.log_history) == 2


def test_printer_callback_prints_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stopping_run(tmp_path, [5, 4], PrinterCallback(), logging_strategy="steps", logging_steps=1).train()
    lines = capsys.readouterr().out.splitlines()
    assert sum("'eval_loss'" in line for line in lines) == 2
    assert "'train_loss'" in lines[-1]


def test_state_has_the_fields_that_hugging_face_callbacks_read(tmp_path: Path) -> None:
    trainer = stopping_run(tmp_path, [5])
    trainer.train()
    read = {"epoch", "global_step", "max_steps", "logging_steps", "eval_steps", "save_steps", "num_train_epochs"}
    read |= {"log_history", "best_metric", "best_model_checkpoint", "is_world_process_zero", "is_local_process_zero"}
    read |= {"is_hyper_param_search", "trial_name", "trial_params", "total_flos", "stateful_callbacks"}
    theirs = TrainerState()
    for name in read:
        assert hasattr(theirs, name) and hasattr(trainer.state, name), name
    assert vars(TrainerControl()).keys() <= set(trainer.control.__slots__)


def test_arguments_are_serialisable_for_loggers() -> None:
    args = TrainingArguments(output_dir="out", lr_scheduler_kwargs={"a": 1}, run_name="first")
    assert json.loads(args.to_json_string())["lr_scheduler_kwargs"] == {"a": 1}
    sanitized = args.to_sanitized_dict()
    assert sanitized["run_name"] == "first" and sanitized["max_steps"] == -1
    assert {type(value) for value in sanitized.values()} <= {bool, int, float, str}
