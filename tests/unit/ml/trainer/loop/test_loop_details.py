"""Edge cases of the training loop: changed settings at a resume, requests at epoch ends, leftovers, NaN weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from forgather.ml.checkpoint.manifest import read_manifest
from forgather.ml.trainer.callbacks import DivergenceDetector
from tests.support.tiny_models import (
    Recorder,
    ScalarModel,
    TokenModel,
    quiet_trainer,
    saved_steps,
    scalars,
    token_samples,
)


def ask_at(step: int, flag: str, event: str = "on_step_end") -> Recorder:
    def ask(state: Any, control: Any, **_: Any) -> None:
        if state.global_step == step:
            setattr(control, flag, True)

    return Recorder(**{event: ask})


def test_resume_with_larger_batches_trains_the_rest_of_the_data(tmp_path: Path) -> None:
    data = scalars(*range(100))
    seen: list[int] = []

    def note(model: ScalarModel, **_: Any) -> None:
        seen.append(1)

    first = quiet_trainer(
        tmp_path,
        ScalarModel(),
        data,
        ask_at(50, "should_training_stop"),
        per_device_train_batch_size=1,
        save_strategy="steps",
    )
    assert first.train().global_step == 50
    resumed = quiet_trainer(
        tmp_path, ScalarModel(), data, Recorder(on_step_end=note), per_device_train_batch_size=10, save_strategy="steps"
    )
    output = resumed.train()
    assert len(seen) == 5 and output.global_step == 55
    assert output.metrics["train_samples"] == 100 and output.metrics["epoch"] == 1.0
    assert resumed.state.max_steps == 55


def test_leftover_gradients_of_a_model_do_not_enter_the_first_step(tmp_path: Path) -> None:
    results = []
    for leftover in (None, torch.tensor(100.0)):
        model = ScalarModel()
        model.weight.grad = leftover
        quiet_trainer(tmp_path / str(leftover), model, scalars(1, 2), max_steps=1).train()
        results.append(model.weight.item())
    assert results[0] == results[1]


def rates_of(tmp_path: Path, recorded: list[float], **arguments: Any) -> Any:
    def note(optimizer: Any, **_: Any) -> None:
        recorded.append(optimizer.param_groups[0]["lr"])

    settings = {
        "learning_rate": 0.01,
        "save_strategy": "steps",
        "save_steps": 5,
        "lr_scheduler_type": "linear",
        **arguments,
    }
    return quiet_trainer(tmp_path, ScalarModel(), scalars(*range(4)), Recorder(on_pre_optimizer_step=note), **settings)


def test_extended_schedule_continues_with_the_new_length(tmp_path: Path) -> None:
    rates: list[float] = []
    rates_of(tmp_path, rates, max_steps=5).train()
    rates_of(tmp_path, rates, max_steps=10).train()
    assert rates[5:] == pytest.approx([0.005, 0.004, 0.003, 0.002, 0.001])


def test_requested_end_of_an_epoch_takes_effect_after_a_resume(tmp_path: Path) -> None:
    data = scalars(*range(10))
    straight = quiet_trainer(
        tmp_path / "a",
        ScalarModel(),
        data,
        ask_at(3, "should_epoch_stop"),
        num_train_epochs=2,
        save_strategy="steps",
        save_steps=3,
    )
    expected = straight.train().global_step

    class Killed(Exception):
        pass

    class Interrupted(Recorder):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                raise Killed

    callback = ask_at(3, "should_epoch_stop")
    trainer = quiet_trainer(
        tmp_path / "b", ScalarModel(), data, callback, num_train_epochs=2, save_strategy="steps", save_steps=3
    )
    trainer.add_callback(Interrupted())
    with pytest.raises(Killed):
        trainer.train()
    resumed = quiet_trainer(
        tmp_path / "b", ScalarModel(), data, num_train_epochs=2, save_strategy="steps", save_steps=3
    )
    assert resumed.train().global_step == expected == 13


def test_requests_at_the_end_of_an_epoch_take_effect_there(tmp_path: Path) -> None:
    def ask(control: Any, **_: Any) -> None:
        control.should_save = True

    trainer = quiet_trainer(
        tmp_path,
        ScalarModel(),
        scalars(*range(4)),
        Recorder(on_epoch_end=ask),
        num_train_epochs=2,
        save_strategy="no",
        save_total_limit=None,
    )
    trainer.train()
    assert saved_steps(tmp_path) == [4, 8]


def test_totals_are_exact_at_every_checkpoint(tmp_path: Path) -> None:
    tokens: list[int] = []

    def note(state: Any, **_: Any) -> None:
        tokens.append(state.num_input_tokens_seen)

    quiet_trainer(
        tmp_path,
        TokenModel(),
        token_samples(4, length=6),
        Recorder(on_save=note),
        save_strategy="steps",
        save_steps=1,
        logging_strategy="steps",
        logging_steps=50,
        save_total_limit=None,
    ).train()
    assert tokens == [6, 12, 18, 24]


def test_nan_weights_never_replace_good_checkpoints(tmp_path: Path) -> None:
    """This also holds if saves are more frequent than logs."""

    def spoil(state: Any, model: ScalarModel, **_: Any) -> None:
        if state.global_step == 12:
            with torch.no_grad():
                model.weight.fill_(float("nan"))

    trainer = quiet_trainer(
        tmp_path,
        ScalarModel(),
        scalars(*range(100)),
        Recorder(on_step_begin=spoil),
        logging_strategy="steps",
        logging_steps=50,
        save_strategy="steps",
        save_steps=10,
        save_total_limit=2,
    )
    trainer.add_callback(DivergenceDetector())
    trainer.train()
    assert saved_steps(tmp_path) == [10]


def test_training_continues_from_a_manually_loaded_checkpoint(tmp_path: Path) -> None:
    data = scalars(*range(10))
    quiet_trainer(
        tmp_path / "a", ScalarModel(), data, max_steps=4, save_strategy="steps", save_steps=2, save_total_limit=None
    ).train()
    path = str(tmp_path / "a" / "checkpoints" / "checkpoint-2")
    assert read_manifest(path).step == 2
    steps: list[int] = []

    def note(state: Any, **_: Any) -> None:
        steps.append(state.global_step)

    trainer = quiet_trainer(
        tmp_path / "b", ScalarModel(), data, Recorder(on_step_end=note), max_steps=4, save_strategy="no"
    )
    assert trainer.load_checkpoint(path) == path
    trainer.train()
    assert steps == [3, 4]
