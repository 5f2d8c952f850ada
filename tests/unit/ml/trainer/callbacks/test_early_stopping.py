"""Early stopping: runs without improvement are stopped."""

import json
import logging
import math
from pathlib import Path

import pytest

from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.trainer.callbacks import EarlyStopping
from tests.support.wrong_values import COUNT, NUMBER, assert_refuses, with_none
from tests.unit.ml.trainer.callbacks.run import Run


def evaluations_until_stop(run: Run, values: list[float], metric: str = "eval_loss") -> int:
    """Return the number of evaluations until the stop."""
    for number, value in enumerate(values, start=1):
        run.state.global_step += 10
        run.evaluate(**{metric: value})
        if run.control.should_training_stop:
            return number
    return len(values)


def test_stops_after_patience_without_improvement(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path, EarlyStopping(patience=2))
    with caplog.at_level(logging.INFO):
        assert evaluations_until_stop(run, [3.0, 2.0, 2.5, 2.4, 1.0]) == 4
    assert "the best is 2 at step 20" in caplog.text


def test_improvement_resets_patience(tmp_path: Path) -> None:
    run = Run(tmp_path, EarlyStopping(patience=2))
    evaluations_until_stop(run, [3.0, 3.1, 2.0, 2.1])
    assert not run.control.should_training_stop


def test_improvements_within_the_threshold_do_not_count(tmp_path: Path) -> None:
    run = Run(tmp_path, EarlyStopping(patience=2, threshold=0.1))
    assert evaluations_until_stop(run, [3.0, 2.95, 2.94, 2.0]) == 3


def test_greater_is_better_for_metrics_other_than_a_loss(tmp_path: Path) -> None:
    run = Run(tmp_path, EarlyStopping(metric="accuracy"))
    assert evaluations_until_stop(run, [0.1, 0.2, 0.3, 0.2, 0.9], "eval_accuracy") == 4


def test_direction_can_be_set(tmp_path: Path) -> None:
    run = Run(tmp_path, EarlyStopping(metric="eval_perplexity", greater_is_better=False))
    assert evaluations_until_stop(run, [9.0, 8.0, 8.5], "eval_perplexity") == 3
    assert run.control.should_training_stop


def test_nan_is_no_improvement(tmp_path: Path) -> None:
    run = Run(tmp_path, EarlyStopping(patience=2))
    assert evaluations_until_stop(run, [math.nan, math.nan, 1.0]) == 2


def test_patience_continues_after_a_resume(tmp_path: Path) -> None:
    before = EarlyStopping(patience=3)
    evaluations_until_stop(Run(tmp_path, before), [2.0, 2.5, 2.5])
    after = EarlyStopping(patience=3)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    run = Run(tmp_path, after, global_step=30)
    run.send("on_train_begin")
    assert evaluations_until_stop(run, [2.5, 2.5]) == 1


def test_missing_metric_is_reported_once_with_the_available_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, EarlyStopping(metric="eval_bleu"))
    evaluations_until_stop(run, [1.0, 2.0, 3.0])
    assert not run.control.should_training_stop
    assert caplog.text.count("eval_bleu") == 1 and "eval_loss" in caplog.text


@pytest.mark.parametrize("settings", [{"patience": 0}, {"threshold": -0.1}], ids=str)
def test_wrong_settings_are_rejected_by_name(settings: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        EarlyStopping(**settings)


def test_lower_perplexity_is_better(tmp_path: Path) -> None:
    run = Run(tmp_path, EarlyStopping(patience=1, metric="eval_perplexity"))
    assert evaluations_until_stop(run, [9.0, 8.0, 7.0, 7.5, 1.0], "eval_perplexity") == 4


STATE = {"best": 0.5, "best_step": 3, "num_without_improvement": 2}


def test_malformed_state_is_rejected_by_name() -> None:
    callback = EarlyStopping()
    accepted = {"best": with_none(NUMBER), "best_step": COUNT, "num_without_improvement": COUNT}
    assert_refuses(callback, STATE, "callbacks.EarlyStopping", accepted)
    with pytest.raises(
        CheckpointLoadError, match=r"callbacks\.EarlyStopping in the checkpoint.*train without the callback"
    ):
        callback.load_state_dict([])  # type: ignore[arg-type]
    callback.load_state_dict({**STATE, "added": object()})
    assert callback.state_dict() == STATE
