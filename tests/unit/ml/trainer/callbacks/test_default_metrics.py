"""Throughput metrics: only training time counts."""

import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.trainer.callbacks import DefaultMetrics
from tests.support.wrong_values import COUNT, assert_refuses, with_none
from tests.unit.ml.trainer.callbacks.run import Run


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clock that only `sleep` advances, so that rates are exact on any machine."""
    now = [1.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))


class Work:
    """Callback that simulates the work of a step."""

    seconds = 0.0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        time.sleep(self.seconds)


class Sampler:
    """Callback that takes time after an evaluation, like text generation."""

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        time.sleep(0.3)


def steps(run: Run, count: int, seconds: float = 0.02) -> None:
    run.callbacks[1].seconds = seconds
    for _ in range(count):
        run.step()


def started(tmp_path: Path, callback: DefaultMetrics, start_step: int = 0, global_step: int = 0) -> Run:
    run = Run(tmp_path, callback, Work(), Sampler(), model=nn.Linear(10, 10, bias=False), global_step=global_step)
    run.args.speed_metrics_start_step = start_step
    run.send("on_train_begin")
    return run


def test_tokens_per_second_of_an_interval(tmp_path: Path) -> None:
    run = started(tmp_path, DefaultMetrics())
    steps(run, 5)
    assert run.log(loss=1.0, tokens=100)["tok_per_sec"] == pytest.approx(1000)


def test_evaluation_and_saving_time_is_not_counted(tmp_path: Path) -> None:
    run = started(tmp_path, DefaultMetrics())
    for event in ("on_evaluate", "on_save"):
        steps(run, 2)
        time.sleep(0.3)
        run.send(event)  # After an evaluation, the sampler is slow too.
    steps(run, 1)
    assert run.log(loss=1.0, tokens=100)["tok_per_sec"] == pytest.approx(1000)


def test_evaluation_right_before_a_log_record_is_not_counted(tmp_path: Path) -> None:
    run = started(tmp_path, DefaultMetrics())
    steps(run, 5)
    run.evaluate(eval_loss=1.0)
    assert run.log(loss=1.0, tokens=100)["tok_per_sec"] == pytest.approx(1000)


def test_warm_up_steps_are_not_counted(tmp_path: Path) -> None:
    run = started(tmp_path, DefaultMetrics(), start_step=1)
    steps(run, 1, seconds=0.5)
    steps(run, 4)
    # 4 of the 5 steps, so 80 of the 100 tokens, in 0.08 seconds.
    assert run.log(loss=1.0, tokens=100)["tok_per_sec"] == pytest.approx(1000)


def test_interval_with_only_warm_up_steps_has_no_throughput(tmp_path: Path) -> None:
    run = started(tmp_path, DefaultMetrics(), start_step=3)
    steps(run, 2)
    assert "tok_per_sec" not in run.log(loss=1.0)


def test_tokens_from_before_a_resume_are_not_counted(tmp_path: Path) -> None:
    before = DefaultMetrics()
    run = started(tmp_path, before)
    steps(run, 10, seconds=0)
    run.log(loss=1.0)
    steps(run, 8, seconds=0)
    resumed = DefaultMetrics()
    resumed.load_state_dict(before.state_dict())
    run = started(tmp_path, resumed, global_step=18)
    steps(run, 2)
    # 2 of the 10 steps of the interval, so 20 of the 100 tokens, in 0.04 seconds.
    assert run.log(loss=1.0, tokens=100)["tok_per_sec"] == pytest.approx(500)


def test_mfu_is_computed_from_the_parameters(tmp_path: Path) -> None:
    run = started(tmp_path, DefaultMetrics(peak_flops=1e6))
    steps(run, 2)
    logs = run.log(loss=1.0)
    assert logs["mfu"] == pytest.approx(logs["tok_per_sec"] * 6 * 100 / 1e6)


def test_mfu_uses_the_flops_counted_by_the_trainer(tmp_path: Path) -> None:
    run = started(tmp_path, DefaultMetrics(peak_flops=1e6))
    steps(run, 2)
    logs = run.log(loss=1.0, total_flos=5000.0, total_tokens=100)
    assert logs["mfu"] == pytest.approx(logs["tok_per_sec"] * 50 / 1e6)


def test_mfu_is_omitted_without_a_peak(tmp_path: Path) -> None:
    run = started(tmp_path, DefaultMetrics())
    steps(run, 2)
    assert "mfu" not in run.log(loss=1.0)


def test_peak_of_zero_is_rejected() -> None:
    with pytest.raises(ValueError, match="peak_flops=0"):
        DefaultMetrics(peak_flops=0)


STATE = {"last_log_step": 3}


def test_malformed_state_is_rejected_by_name() -> None:
    callback = DefaultMetrics()
    assert_refuses(callback, STATE, "callbacks.DefaultMetrics", {"last_log_step": with_none(COUNT)})
    with pytest.raises(
        CheckpointLoadError, match=r"callbacks\.DefaultMetrics in the checkpoint.*train without the callback"
    ):
        callback.load_state_dict([])  # type: ignore[arg-type]
    callback.load_state_dict({**STATE, "added": object()})
    assert callback.state_dict() == STATE
