"""Divergence in real runs: a NaN loss ends the run, reports the step and leaves a good checkpoint."""

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from forgather.ml.trainer.callbacks import DivergenceDetector
from forgather.ml.trainer.trainer import Trainer
from tests.support.tiny_models import Recorder, ScalarModel, quiet_trainer, saved_steps, scalars

NUM_GOOD = 5
SETTINGS: dict[str, Any] = {
    "logging_strategy": "steps",
    "logging_steps": 1,
    "learning_rate": 0.0,
    "save_strategy": "steps",
}


def diverging(output_dir: Path, model: ScalarModel, *callbacks: Any, **settings: Any) -> Trainer:
    """Return a trainer with a NaN in the sixth batch and a save every second step: step 4 is the last good checkpoint."""
    defaults: dict[str, Any] = {
        "logging_strategy": "steps",
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 2,
        "learning_rate": 0.01,
    }
    # By default, nonfinite_grad itself ends such a run with an error.
    settings = {"nonfinite_grad": "ignore", **settings}
    data = scalars(*[1.0] * NUM_GOOD, math.nan, *[1.0] * 4)
    return quiet_trainer(output_dir, model, data, *callbacks, **{**defaults, **settings})


@pytest.mark.parametrize(
    ("action", "outcome"), [("stop", "stops without saving"), ("abort", "is aborted without saving")]
)
def test_training_ends_at_the_nan_step_and_reports_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, action: str, outcome: str
) -> None:
    with caplog.at_level(logging.INFO, logger="forgather"):
        output = diverging(tmp_path, ScalarModel(), DivergenceDetector(action=action)).train()
    assert output.global_step == NUM_GOOD + 1
    (error,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert f"Divergence at step {NUM_GOOD + 1}: the loss is nan" in error and outcome in error
    assert "DivergenceDetector requested should_training_stop in on_step_end" in caplog.messages


@pytest.mark.parametrize("action", ["stop", "abort"])
@pytest.mark.parametrize("save_total_limit", [1, 2])
def test_resume_finds_the_last_good_checkpoint(tmp_path: Path, action: str, save_total_limit: int) -> None:
    model = ScalarModel()
    diverging(tmp_path, model, DivergenceDetector(action=action), save_total_limit=save_total_limit).train()
    assert math.isnan(model.weight.item())
    assert saved_steps(tmp_path) == [2, 4][-save_total_limit:]
    recorder, resumed = Recorder(), ScalarModel()
    clean = quiet_trainer(
        tmp_path, resumed, scalars(*[1.0] * 10), recorder, learning_rate=0.01, save_strategy="steps", save_steps=2
    )
    assert clean.train().global_step == 10
    assert recorder.steps("on_step_end") == [5, 6, 7, 8, 9, 10]
    assert resumed.weight.item() == pytest.approx(0.9)


@pytest.mark.parametrize(("action", "saved"), [("stop", [4, 7]), ("abort", [4])])
def test_rising_loss_ends_training(tmp_path: Path, action: str, saved: list[int]) -> None:
    rising = scalars(*[1.0] * 4, *[3.0] * 10)
    detector = DivergenceDetector(action=action, threshold=0.5, patience=3, smoothing=0.0)
    output = quiet_trainer(tmp_path, ScalarModel(), rising, detector, save_steps=4, **SETTINGS).train()
    assert output.global_step == 7
    assert saved_steps(tmp_path) == saved


def test_divergence_patience_counts_across_a_resume(tmp_path: Path) -> None:
    def run(max_steps: int) -> int:
        rising = scalars(*[1.0] * 4, *[3.0] * 10)
        detector = DivergenceDetector(action="stop", threshold=0.5, patience=3, smoothing=0.0)
        trainer = quiet_trainer(tmp_path, ScalarModel(), rising, detector, max_steps=max_steps, **SETTINGS)
        return trainer.train().global_step

    assert run(6) == 6
    assert run(14) == 7


def test_nan_is_in_the_log_and_in_the_final_metrics(tmp_path: Path) -> None:
    recorder = Recorder()
    output = diverging(tmp_path, ScalarModel(), recorder, DivergenceDetector(action="abort")).train()
    assert [math.isnan(logs["loss"]) for _, logs in recorder.logs] == [False] * NUM_GOOD + [True]
    assert math.isnan(recorder.logs[-1][1]["grad_norm"])
    assert math.isnan(output.metrics["train_loss"])
    assert torch.is_tensor(recorder.details("on_train_metrics", "loss")[-1])
