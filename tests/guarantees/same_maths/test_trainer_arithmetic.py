"""Accumulation windows, epochs, logging intervals and totals of the training loop, with exact values."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forgather.ml.trainer.loop.metrics import IntervalMetrics
from tests.support.tiny_models import (
    Recorder,
    ScalarModel,
    Stream,
    TokenModel,
    quiet_trainer,
    scalars,
    token_samples,
)


def record_gradients(into: list[float]) -> Recorder:
    def note(model: ScalarModel, **_: Any) -> None:
        assert model.weight.grad is not None
        into.append(model.weight.grad.item())

    return Recorder(on_pre_optimizer_step=note)


def stop_at(step: int, event: str = "on_step_end", flag: str = "should_training_stop") -> Recorder:
    def ask(state: Any, control: Any, **_: Any) -> None:
        if state.global_step == step:
            setattr(control, flag, True)

    return Recorder(**{event: ask})


# --- windows


def test_accumulation_windows_end_with_the_epoch(tmp_path: Path) -> None:
    gradients: list[float] = []
    recorder = record_gradients(gradients)
    output = quiet_trainer(
        tmp_path, ScalarModel(), scalars(1, 2, 3, 4, 5), recorder, gradient_accumulation_steps=2, num_train_epochs=2
    ).train()
    assert gradients == [1.5, 3.5, 5.0, 1.5, 3.5, 5.0]
    assert output.global_step == 6
    assert recorder.names.count("on_forward_backward_end") == 10


def test_drop_last_drops_the_incomplete_window(tmp_path: Path) -> None:
    gradients: list[float] = []
    output = quiet_trainer(
        tmp_path,
        ScalarModel(),
        scalars(1, 2, 3, 4, 5),
        record_gradients(gradients),
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        dataloader_drop_last=True,
    ).train()
    assert gradients == [1.5, 3.5, 1.5, 3.5]
    assert output.metrics["epoch"] == 2.0


def test_short_last_batch_is_weighted_by_its_samples(tmp_path: Path) -> None:
    gradients: list[float] = []
    quiet_trainer(
        tmp_path,
        ScalarModel(),
        scalars(1, 2, 6),
        record_gradients(gradients),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
    ).train()
    assert gradients == [3.0]


# --- number of steps


def test_max_steps_overrides_num_train_epochs(tmp_path: Path) -> None:
    recorder = Recorder()
    output = quiet_trainer(
        tmp_path, ScalarModel(), scalars(1, 2, 3, 4, 5), recorder, max_steps=100, num_train_epochs=1
    ).train()
    assert output.global_step == 100
    assert output.metrics["epoch"] == 20.0
    assert recorder.names.count("on_epoch_begin") == recorder.names.count("on_epoch_end") == 20


@pytest.mark.parametrize(("epochs", "steps"), [(1.5, 6), (0.5, 2), (0.3, 2), (2, 8)])
def test_epochs_may_be_fractions(tmp_path: Path, epochs: float, steps: int) -> None:
    output = quiet_trainer(tmp_path, ScalarModel(), scalars(1, 2, 3, 4), num_train_epochs=epochs).train()
    assert output.global_step == steps
    assert output.metrics["epoch"] == steps / 4


def test_negative_epochs_train_until_a_callback_stops(tmp_path: Path) -> None:
    output = quiet_trainer(tmp_path, ScalarModel(), scalars(1, 2, 3), stop_at(11), num_train_epochs=-1).train()
    assert output.global_step == 11
    assert output.metrics["epoch"] == pytest.approx(3 + 2 / 3)


def test_zero_steps_train_nothing(tmp_path: Path) -> None:
    model, recorder = ScalarModel(0.25), Recorder()
    output = quiet_trainer(tmp_path, model, scalars(1, 2), recorder, max_steps=0, logging_strategy="steps").train()
    assert (output.global_step, output.metrics["train_loss"], model.weight.item()) == (0, 0.0, 0.25)
    assert recorder.names == ["on_init_end", "on_train_begin", "on_log", "on_train_end"]


def test_epoch_stop_ends_only_the_epoch(tmp_path: Path) -> None:
    recorder = stop_at(2, flag="should_epoch_stop")
    output = quiet_trainer(tmp_path, ScalarModel(), scalars(1, 2, 3, 4), recorder, max_steps=6).train()
    assert output.global_step == 6
    assert recorder.steps("on_epoch_begin") == [0, 2]
    assert recorder.steps("on_epoch_end") == [2, 6]
    assert output.metrics["epoch"] == 2.0


def test_stream_without_length_ends_with_its_data(tmp_path: Path) -> None:
    epochs: list[float] = []
    recorder = Recorder(on_step_end=lambda state, **_: epochs.append(state.epoch))
    output = quiet_trainer(
        tmp_path,
        ScalarModel(),
        Stream(scalars(1, 2, 3, 4, 5)),
        recorder,
        num_train_epochs=2,
        epoch_train_steps=10,
        logging_strategy="steps",
        logging_steps=2,
    ).train()
    assert output.global_step == 10
    assert epochs == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 1.1, 1.2, 1.3, 1.4, 1.5])
    assert output.metrics["epoch"] == 2.0
    assert [step for step, _ in recorder.logs] == [2, 4, 6, 8, 10]


def test_epoch_value_is_capped_if_an_epoch_is_longer_than_assumed(tmp_path: Path) -> None:
    epochs: list[float] = []
    recorder = Recorder(on_step_end=lambda state, **_: epochs.append(state.epoch))
    stream = Stream(scalars(1, 2, 3))
    quiet_trainer(tmp_path, ScalarModel(), stream, recorder, num_train_epochs=2, epoch_train_steps=2).train()
    assert epochs == [0.5, 1.0, 1.0, 1.5, 2.0, 2.0]


def test_epoch_is_fractional(tmp_path: Path) -> None:
    epochs: list[float] = []
    recorder = Recorder(on_step_end=lambda state, **_: epochs.append(state.epoch))
    quiet_trainer(
        tmp_path, ScalarModel(), scalars(*range(8)), recorder, num_train_epochs=2, gradient_accumulation_steps=2
    ).train()
    assert epochs == [0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0]


# --- logging


def logged_steps(tmp_path: Path, samples: int, **settings: Any) -> list[int]:
    recorder = Recorder()
    settings = {"logging_strategy": "steps", **settings}
    quiet_trainer(tmp_path, ScalarModel(), scalars(*range(samples)), recorder, **settings).train()
    assert recorder.steps("on_log_step") == [step for step, _ in recorder.logs]
    return [step for step, _ in recorder.logs]


def test_short_last_interval_is_logged_and_no_step_twice(tmp_path: Path) -> None:
    assert logged_steps(tmp_path, 7, logging_steps=3) == [3, 6, 7]
    assert logged_steps(tmp_path, 6, logging_steps=3) == [3, 6]


def test_first_step_is_logged_on_request(tmp_path: Path) -> None:
    assert logged_steps(tmp_path, 7, logging_steps=3, logging_first_step=True) == [1, 3, 6, 7]
    assert logged_steps(tmp_path, 2, logging_steps=1, logging_first_step=True) == [1, 2]


def test_logging_strategy_epoch_logs_once_per_epoch(tmp_path: Path) -> None:
    assert logged_steps(tmp_path, 8, logging_strategy="epoch", num_train_epochs=3, gradient_accumulation_steps=4) == [
        2,
        4,
        6,
    ]


def test_log_record_covers_its_interval(tmp_path: Path) -> None:
    recorder = Recorder()
    quiet_trainer(
        tmp_path,
        ScalarModel(),
        scalars(1, 2, 3, 4, 5),
        recorder,
        learning_rate=0.0,
        logging_strategy="steps",
        logging_steps=2,
    ).train()
    losses = [(step, logs["loss"], logs["epoch"]) for step, logs in recorder.logs]
    assert losses == [(2, 1.5, 0.4), (4, 3.5, 0.8), (5, 5.0, 1.0)]
    norms = [(logs["grad_norm"], logs["max_grad_norm"]) for _, logs in recorder.logs]
    assert norms[0] == (pytest.approx(math.sqrt((1 + 4) / 2)), 2.0)
    assert [logs["total_tokens"] for _, logs in recorder.logs] == [2, 4, 5]


# --- totals


@pytest.mark.parametrize("logging", ["steps", "epoch", "no"])
def test_totals_do_not_depend_on_the_logging_strategy(tmp_path: Path, logging: str) -> None:
    recorder = Recorder()
    trainer = quiet_trainer(
        tmp_path,
        TokenModel(),
        token_samples(10, length=6),
        recorder,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        logging_strategy=logging,
        logging_steps=3,
        learning_rate=0.0,
    )
    metrics = trainer.train().metrics
    assert metrics["train_samples"] == 20
    assert metrics["total_tokens"] == 20 * 6
    assert metrics["effective_batch_size"] == 8
    assert metrics["step"] == 4
    assert trainer.state.num_input_tokens_seen == 120
    # The learning rate is 0, so the mean loss of the run is the evaluation loss of its data.
    assert metrics["train_loss"] == pytest.approx(trainer.evaluate(token_samples(10))["eval_loss"], rel=1e-6)
    per_token = 6 * trainer.unwrapped_model().head.weight.numel()  # type: ignore[union-attr,operator]
    assert metrics["total_flops"] == 120 * per_token


def test_gradient_norm_is_logged_before_clipping(tmp_path: Path) -> None:
    model, recorder = ScalarModel(), Recorder()
    quiet_trainer(
        tmp_path, model, scalars(3), recorder, learning_rate=1.0, max_grad_norm=1.0, logging_strategy="steps"
    ).train()
    assert model.weight.item() == pytest.approx(0.0, abs=1e-5)
    assert recorder.logs[0][1]["grad_norm"] == 3.0


# --- intervals


def add_steps(interval: IntervalMetrics, steps: range) -> None:
    for step in steps:
        loss = torch.tensor(1.0 / (step + 1))
        interval.add(loss, torch.tensor(step % 7) if step % 2 else step % 7, loss * 3, 6, 2)


def as_it_is(numbers: Tensor) -> Tensor:
    return numbers


def test_long_interval_requests_settling() -> None:
    interval = IntervalMetrics()
    num_steps = 2500
    for step in range(num_steps):
        add_steps(interval, range(step, step + 1))
        if interval.wants_settling:
            assert (step + 1) % 1000 == 0
            interval.settle(as_it_is)
    sums = interval.settle(as_it_is)
    assert interval.num_steps == sums.num_steps == num_steps
    assert (sums.tokens, sums.samples) == (6 * num_steps, 2 * num_steps)
    assert sums.targets == sum(step % 7 for step in range(num_steps))
    expected = sum(float(torch.tensor(1.0 / (step + 1))) * (step % 7) for step in range(num_steps))
    assert sums.loss_sum == expected
    assert list(sums.norms) == [float(torch.tensor(1.0 / (step + 1)) * 3) for step in range(num_steps)]


@pytest.mark.parametrize("saved_at", [1, 9, 24])
def test_interval_continues_after_a_resume(saved_at: int) -> None:
    straight, first, resumed = IntervalMetrics(), IntervalMetrics(), IntervalMetrics()
    add_steps(straight, range(25))
    add_steps(first, range(saved_at))
    first.settle(as_it_is)
    resumed.load_state_dict(first.state_dict())
    add_steps(resumed, range(saved_at, 25))
    assert vars(resumed.settle(as_it_is)) == vars(straight.settle(as_it_is))
    resumed.reset()
    assert resumed.num_steps == 0


def test_unsettled_interval_cannot_be_saved() -> None:
    interval = IntervalMetrics()
    add_steps(interval, range(1))
    with pytest.raises(RuntimeError, match=r"Call settle\(\) before state_dict\(\)"):
        interval.state_dict()
