"""Divergence detection: runs with NaN or rising losses are stopped."""

import json
import logging
import math
from pathlib import Path

import pytest

from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.trainer.callbacks import DivergenceDetector
from tests.support.wrong_values import COUNT, NUMBER, assert_refuses, with_none
from tests.unit.ml.trainer.callbacks.run import Run


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_nan_or_infinite_loss_stops_at_once(tmp_path: Path, loss: float, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path, DivergenceDetector())
    run.train([3.0, 2.0, loss, 1.0])
    assert run.state.global_step == 3
    assert run.control.should_training_stop
    assert run.control.should_abort_without_save  # The weights are not finite either.
    assert f"Divergence at step 3: the loss is {loss}" in caplog.text


def test_abort_skips_the_last_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path, DivergenceDetector(action="abort", smoothing=0.0))
    run.train([2.0] + [9.0] * 9)
    assert run.control.should_training_stop and run.control.should_abort_without_save


def test_lasting_rise_stops_after_patience(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path, DivergenceDetector(threshold=0.5, patience=2, smoothing=0.0))
    run.train([4.0, 2.0, 3.1, 3.2, 3.3])
    assert run.state.global_step == 4
    assert not run.control.should_abort_without_save
    assert "2 at step 2" in caplog.text


def test_single_spike_is_tolerated(tmp_path: Path) -> None:
    run = Run(tmp_path, DivergenceDetector(threshold=0.5, patience=2, smoothing=0.0))
    run.train([2.0, 9.0, 2.0, 9.0, 2.0])
    assert not run.control.should_training_stop


def test_smoothing_hides_a_spike_but_not_a_trend(tmp_path: Path) -> None:
    run = Run(tmp_path, DivergenceDetector(threshold=0.5, patience=1, smoothing=0.9))
    run.train([2.0] * 10 + [6.0] + [2.0] * 10)
    assert not run.control.should_training_stop
    run.train([6.0] * 10)
    assert run.control.should_training_stop


def test_falling_negative_loss_is_no_divergence(tmp_path: Path) -> None:
    run = Run(tmp_path, DivergenceDetector(threshold=0.5, patience=1, smoothing=0.0))
    run.train([-1.0, -2.0, -1.5])
    assert not run.control.should_training_stop
    run.train([-0.5])
    assert run.control.should_training_stop


def test_patience_continues_after_a_resume(tmp_path: Path) -> None:
    def detector() -> DivergenceDetector:
        return DivergenceDetector(threshold=0.5, patience=3, smoothing=0.0)

    before = detector()
    Run(tmp_path, before).train([2.0, 4.0, 4.0])
    after = detector()
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    run = Run(tmp_path, after, global_step=3)
    run.send("on_train_begin")
    run.train([4.0])
    assert run.control.should_training_stop


def test_state_before_the_first_record_can_be_stored() -> None:
    detector = DivergenceDetector()
    detector.load_state_dict(json.loads(json.dumps(detector.state_dict(), allow_nan=False)))


def test_fresh_run_resets_the_detector(tmp_path: Path) -> None:
    detector = DivergenceDetector(threshold=0.1, patience=1, smoothing=0.0)
    Run(tmp_path, detector).train([1.0])
    run = Run(tmp_path, detector)
    run.send("on_train_begin")
    run.train([9.0])
    assert not run.control.should_training_stop


def test_only_rank_zero_logs_but_all_ranks_stop(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path, DivergenceDetector(), is_world_process_zero=False)
    with caplog.at_level(logging.INFO):
        run.train([math.nan])
    assert run.control.should_training_stop
    assert not caplog.text


@pytest.mark.parametrize(
    "settings", [{"action": "explode"}, {"threshold": -1.0}, {"patience": 0}, {"smoothing": 1.0}], ids=str
)
def test_wrong_settings_are_rejected_by_name(settings: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        DivergenceDetector(**settings)


STATE = {"smoothed": 0.5, "best": 0.25, "best_step": 3, "num_above": 2}


def test_malformed_state_is_rejected_by_name() -> None:
    callback = DivergenceDetector()
    numbers = {"smoothed": with_none(NUMBER), "best": with_none(NUMBER)}
    assert_refuses(callback, STATE, "callbacks.DivergenceDetector", {**numbers, "best_step": COUNT, "num_above": COUNT})
    with pytest.raises(CheckpointLoadError, match=r"callbacks\.DivergenceDetector in the checkpoint.*train without"):
        callback.load_state_dict([])  # type: ignore[arg-type]
    callback.load_state_dict({**STATE, "added": object()})
    assert callback.state_dict() == STATE
