"""Default callbacks stay when others are passed, and every callback sees the metrics that another one adds."""

import io
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from rich.console import Console
from transformers import EarlyStoppingCallback

from forgather.ml.distributed import StaticDistributedEnvironment
from forgather.ml.trainer.accelerate.accel_trainer import AccelTrainer
from forgather.ml.trainer.callbacks import (
    DefaultMetrics,
    EarlyStopping,
    InfoCallback,
    JsonLogger,
    PlotCallback,
    ProgressCallback,
    RunRecorder,
)
from forgather.ml.trainer.ddp.ddp_trainer import DDPTrainer
from forgather.ml.trainer.hybrid import HybridTrainer
from forgather.ml.trainer.pipeline import PipelineTrainer
from forgather.ml.trainer.trainer import Trainer
from tests.support.tiny_models import ScalarModel, Stream, quiet_trainer, scalars, tiny_llama, token_samples

DEFAULTS = [ProgressCallback, InfoCallback, DefaultMetrics, JsonLogger, RunRecorder]


class Mine:
    """Callback with a class that is not among the defaults."""


class OwnProgress(ProgressCallback):
    pass


def kinds(trainer: Trainer) -> list[type]:
    return [type(callback) for callback in trainer.callbacks]


# --- registered callbacks


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, DEFAULTS),
        ({"callbacks": []}, DEFAULTS),
        ({"callbacks": [Mine()]}, [*DEFAULTS, Mine]),
        ({"callbacks": [Mine, JsonLogger()]}, [*DEFAULTS[:3], RunRecorder, Mine, JsonLogger]),
        ({"callbacks": [OwnProgress, ProgressCallback]}, [*DEFAULTS[1:], OwnProgress, ProgressCallback]),
        ({"default_callbacks": False}, []),
        ({"callbacks": [Mine(), DefaultMetrics()], "default_callbacks": False}, [Mine, DefaultMetrics]),
    ],
    ids=["none passed", "empty", "own", "same class", "subclass, then the class again", "off", "own alone"],
)
def test_passed_callbacks_are_added_to_the_defaults(
    tmp_path: Path, given: dict[str, Any], expected: list[type]
) -> None:
    trainer = Trainer(args={"output_dir": str(tmp_path)}, model=ScalarModel(), **given)
    assert kinds(trainer) == expected
    for callback in given.get("callbacks", ()):
        assert isinstance(callback, type) or any(callback is one for one in trainer.callbacks)


@pytest.mark.parametrize("kind", [DDPTrainer, PipelineTrainer, HybridTrainer, AccelTrainer])
def test_all_trainers_have_the_default_callbacks(tmp_path: Path, kind: type[Trainer]) -> None:
    options: dict[str, Any] = {"accelerator": Accelerator(cpu=True)} if kind is AccelTrainer else {}
    if issubclass(kind, PipelineTrainer):
        ranks = StaticDistributedEnvironment(world_size=2, local_world_size=2)
        options |= {"pipe_schedule_factory": "1f1b", "distributed_env": ranks}
    args = {"output_dir": str(tmp_path), **({"pp_size": 2} if kind is HybridTrainer else {})}
    build = {"args": args, "model_init": tiny_llama, "train_dataset": token_samples(4)}
    assert kinds(kind(**build, **options, callbacks=[Mine()])) == [*DEFAULTS, Mine]
    assert kinds(kind(**build, **options, default_callbacks=False)) == []


def test_callback_added_later_replaces_the_default_of_its_class(tmp_path: Path) -> None:
    trainer = Trainer(args={"output_dir": str(tmp_path)}, model=ScalarModel())
    own = JsonLogger("mine.jsonl")
    trainer.add_callback(own)
    trainer.add_callback(JsonLogger("another.jsonl"))
    assert kinds(trainer) == [*DEFAULTS[:3], RunRecorder, JsonLogger, JsonLogger] and trainer.callbacks[4] is own


# --- metrics that callbacks add


class AddsMetrics:
    """Adds metrics to every log and evaluation; the evaluation metric never improves."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        logs["tok_per_sec"] = 123.0
        logs["temperature"] = 0.75

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, Any], **_: Any) -> None:
        metrics["eval_score"] = 0.5


def records(output_dir: Path, name: str = "trainer_logs.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output_dir / name).read_text().splitlines()]


@pytest.mark.parametrize("place", [0, 5], ids=["first", "last"])
def test_added_metrics_are_seen_at_any_position_in_the_list(tmp_path: Path, place: int) -> None:
    shown, plot = io.StringIO(), PlotCallback(min_seconds=1000)
    readers = [
        ProgressCallback(Console(file=shown)),
        JsonLogger(),
        plot,
        EarlyStopping(patience=2, metric="score"),
        EarlyStoppingCallback(early_stopping_patience=50),
    ]
    trainer = quiet_trainer(
        tmp_path,
        ScalarModel(),
        scalars(*range(9)),
        *readers[:place],
        AddsMetrics(),
        *readers[place:],
        logging_strategy="steps",
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="score",
        trainer_options={"eval_dataset": scalars(1)},
    )
    assert trainer.train().global_step == 6, "the score did not improve twice in a row"
    assert "temperature 0.7500" in shown.getvalue() and "score 0.5000" in shown.getvalue()
    written = records(tmp_path)
    assert [one["temperature"] for one in written if "loss" in one] == [0.75] * 6
    assert [one["eval_score"] for one in written if "eval_loss" in one] == [0.5] * 3
    assert plot.state_dict()["tok_per_sec"]["values"] == [123.0] * 6
    assert all(one["temperature"] == 0.75 for one in trainer.state.log_history if "loss" in one)


# --- log history of every run


def run_for(output_dir: Path, *callbacks: Any, **settings: Any) -> Trainer:
    """Return a trainer with its default callbacks."""
    arguments: dict[str, Any] = {
        "output_dir": str(output_dir),
        "use_cpu": True,
        "seed": 0,
        "per_device_train_batch_size": 1,
        "logging_steps": 1,
        **settings,
    }
    data = {"train_dataset": scalars(*range(6)), "eval_dataset": scalars(1, 2)}
    return Trainer(args=arguments, model=ScalarModel(), callbacks=callbacks, **data)


def steps_of(output_dir: Path) -> list[tuple[int, str]]:
    """Return the step and kind of each record."""
    names = ("train_runtime", "eval_loss", "loss")
    return [(one["step"], next(name for name in names if name in one)) for one in records(output_dir)]


def test_run_without_passed_callbacks_writes_its_history(tmp_path: Path) -> None:
    trainer = run_for(tmp_path, save_strategy="no")
    trainer.evaluate()
    assert not (tmp_path / "trainer_logs.jsonl").exists(), "an evaluation alone writes no file"
    trainer.train()
    trained = [(0, "eval_loss"), *((step, "loss") for step in range(1, 7)), (6, "train_runtime")]
    assert steps_of(tmp_path) == trained
    trainer.evaluate()
    assert steps_of(tmp_path) == [*trained, (6, "eval_loss")]
    run_for(tmp_path, save_strategy="no", max_steps=1).train()
    assert steps_of(tmp_path) == [(1, "loss"), (1, "train_runtime")]
    assert len(records(tmp_path, "trainer_logs.previous.jsonl")) == 9, "a fresh run keeps the previous history"


class Killed(BaseException):
    pass


class KillsAfterEvaluation:
    """Simulates a kill after an evaluation that follows the save of its step."""

    reads_final_metrics = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        raise Killed


def test_resume_does_not_duplicate_records(tmp_path: Path) -> None:
    """The evaluation at the end of an epoch follows the checkpoint of its last step, so a resumed run repeats it."""
    settings = {"num_train_epochs": 2, "eval_strategy": "epoch", "save_steps": 3}
    straight = run_for(tmp_path / "straight", **settings)
    straight.train()
    with pytest.raises(Killed):
        run_for(tmp_path / "killed", KillsAfterEvaluation(), **settings).train()
    assert steps_of(tmp_path / "killed")[-1] == (6, "eval_loss")
    for _ in range(2):
        # The second run has no step left to train.
        run_for(tmp_path / "killed", **settings).train()
        assert steps_of(tmp_path / "killed") == steps_of(tmp_path / "straight")


def test_unwritable_log_file_does_not_end_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.makedirs(tmp_path / "trainer_logs.jsonl")
    assert run_for(tmp_path, save_strategy="no").train().global_step == 6
    said = [record.getMessage() for record in caplog.records if "log file" in record.getMessage()]
    assert len(said) == 1 and "choose a writable output_dir" in said[0]


# --- warnings about assumptions


def warnings_of(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING and words in one.getMessage()]


def test_data_without_length_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number, settings in enumerate(
        ({}, {"lr_scheduler_type": "linear"}, {"max_steps": 1}, {"epoch_train_steps": 4})
    ):
        quiet_trainer(tmp_path / str(number), ScalarModel(), Stream(scalars(1, 2)), **settings).train()
    without, with_schedule = warnings_of(caplog, "no length")
    assert "(Stream) have no length, so epoch_train_steps=100000 steps per epoch are assumed. Set max_steps" in without
    assert "lr_scheduler_type='linear' decays over that many" in with_schedule


def test_schedule_without_an_end_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Stops:
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = True

    for schedule in ("cosine", "constant"):
        settings = {"num_train_epochs": -1, "lr_scheduler_type": schedule}
        quiet_trainer(tmp_path, ScalarModel(), scalars(1, 2), Stops(), **settings).train()
    (said,) = warnings_of(caplog, "set no limit")
    assert "lr_scheduler_type='cosine' never decays. Set max_steps" in said


def test_resume_without_a_checkpoint_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "notes.txt").write_text("of something else")
    asked: list[dict[str, Any]] = [{}, {"resume_from_checkpoint": False}, {"resume_from_checkpoint": True}]
    for keywords in asked:
        quiet_trainer(tmp_path, ScalarModel(), scalars(1)).train(**keywords)
    (said,) = warnings_of(caplog, "nothing to resume")
    for words in ("resume_from_checkpoint=True", str(tmp_path), "notes.txt", "'checkpoints'", "starts at step 0"):
        assert words in said
    quiet_trainer(tmp_path, ScalarModel(), scalars(1, 2), max_steps=1, save_strategy="steps").train()
    quiet_trainer(tmp_path, ScalarModel(), scalars(1, 2)).train(resume_from_checkpoint=True)
    assert len(warnings_of(caplog, "nothing to resume")) == 1
