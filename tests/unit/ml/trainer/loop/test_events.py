"""Callback events: order, keywords, and the effect of requests."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from forgather.ml.trainer.callbacks.handler import CallbackHandler
from forgather.ml.trainer.trainer import Trainer, TrainerState
from forgather.ml.trainer.trainer_types import TrainerCallback, TrainerControl
from tests.support.tiny_models import Recorder, ScalarModel, quiet_trainer, scalars

KEYWORDS = {
    "args",
    "state",
    "control",
    "model",
    "processing_class",
    "optimizer",
    "lr_scheduler",
    "train_dataloader",
    "eval_dataloader",
    "trainer",
}
MICRO_BATCH = ["on_forward_backward_begin", "on_forward_backward_end"]
UPDATE = ["on_pre_optimizer_step", "on_optimizer_step", "on_train_metrics", "on_step_end"]
LOG = ["on_log_step", "on_log"]
EVALUATION = ["on_prediction_step"] * 3 + ["on_evaluate"]


def step(num_micro_batches: int) -> list[str]:
    return ["on_step_begin", *MICRO_BATCH * num_micro_batches, *UPDATE]


def test_events_have_a_fixed_order(tmp_path: Path) -> None:
    recorder = Recorder()
    quiet_trainer(
        tmp_path,
        ScalarModel(),
        scalars(1, 2, 3),
        recorder,
        trainer_options={"eval_dataset": scalars(2, 4, 6)},
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        logging_strategy="steps",
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=3,
    ).train()
    first_epoch = [*step(2), *step(1), *LOG, *EVALUATION]
    second_epoch = [*step(2), "on_save", *step(1), *LOG, *EVALUATION, "on_save"]
    assert recorder.names == [
        "on_init_end",
        "on_train_begin",
        *["on_epoch_begin", *first_epoch, "on_epoch_end"],
        *["on_epoch_begin", *second_epoch, "on_epoch_end"],
        "on_log",
        "on_train_end",
    ]


def test_epoch_strategies_act_before_the_end_of_the_epoch(tmp_path: Path) -> None:
    recorder = Recorder()
    quiet_trainer(
        tmp_path,
        ScalarModel(),
        scalars(1),
        recorder,
        trainer_options={"eval_dataset": scalars(2, 4, 6)},
        logging_strategy="epoch",
        eval_strategy="epoch",
        save_strategy="epoch",
    ).train()
    assert recorder.names[3:-2] == [*step(1), *LOG, *EVALUATION, "on_save", "on_epoch_end"]


def test_handlers_get_the_documented_keywords(tmp_path: Path) -> None:
    given: dict[str, dict[str, Any]] = {}

    class Everything:
        def __getattr__(self, name: str) -> Any:
            if not name.startswith("on_") or name == "on_load_model_weights":
                raise AttributeError(name)
            return partial(self._note, name)

        def _note(self, event: str, args: Any, state: Any, control: Any, /, **keywords: Any) -> None:
            assert not keywords.keys() & {"args", "state", "control"}
            given.setdefault(event, {"args": args, "state": state, "control": control, **keywords})

    tokenizer = object()
    trainer = quiet_trainer(
        tmp_path,
        ScalarModel(),
        scalars(1, 2),
        Everything(),
        trainer_options={"eval_dataset": scalars(3), "processing_class": tokenizer},
        logging_strategy="steps",
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
    )
    trainer.train()
    own = {
        "on_log_step": {"logs"},
        "on_log": {"logs"},
        "on_evaluate": {"metrics"},
        "on_train_metrics": {"loss", "grad_norm", "tokens"},
        "on_prediction_step": {"loss", "tokens", "batch", "logits", "labels"},
        "on_save": {"checkpoint_path"},
    }
    assert own.keys() <= given.keys()
    for event, keywords in given.items():
        assert keywords.keys() == KEYWORDS | own.get(event, set()), event
        assert isinstance(keywords["state"], TrainerState)
        assert isinstance(keywords["control"], TrainerControl)
        assert keywords["trainer"] is trainer
        assert keywords["model"] is trainer.model
        assert keywords["args"] is trainer.args
        assert keywords["processing_class"] is tokenizer
        assert keywords["optimizer"] is trainer.optimizer is not None
        assert keywords["lr_scheduler"] is trainer.lr_scheduler is not None
        assert keywords["train_dataloader"] is trainer.train_dataloader is not None
    assert given["on_evaluate"]["eval_dataloader"] is not None
    assert Path(given["on_save"]["checkpoint_path"]).name == "checkpoint-2"


def test_metrics_of_a_step_are_tensors(tmp_path: Path) -> None:
    recorder = Recorder()
    quiet_trainer(tmp_path, ScalarModel(2.0), scalars(3), recorder).train()
    assert recorder.details("on_train_metrics", "loss")[0].item() == 6.0
    assert recorder.details("on_train_metrics", "grad_norm")[0].item() == 3.0
    assert recorder.details("on_train_metrics", "tokens") == [1]


class StopsByReturn(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> TrainerControl | None:
        return TrainerControl(should_training_stop=True) if state.global_step == 2 else None


class StopsInPlace:
    name = "the second"

    def on_log(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        control.should_training_stop = True


@pytest.mark.parametrize(
    ("callback", "said", "last_step"),
    [
        (StopsByReturn(), "StopsByReturn requested should_training_stop in on_step_end", 2),
        (StopsInPlace(), "the second requested should_training_stop in on_log", 3),
    ],
)
def test_stop_request_takes_effect_and_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, callback: Any, said: str, last_step: int
) -> None:
    settings: dict[str, Any] = {"logging_strategy": "steps", "logging_steps": 3}
    with caplog.at_level(logging.INFO, logger="forgather"):
        output = quiet_trainer(tmp_path, ScalarModel(), scalars(*range(9)), callback, **settings).train()
    assert output.global_step == last_step
    assert [record.getMessage() for record in caplog.records if "requested" in record.getMessage()] == [said]


@pytest.mark.parametrize(
    ("flag", "event"), [("should_log", "on_log"), ("should_save", "on_save"), ("should_evaluate", "on_evaluate")]
)
def test_callback_may_request_an_action_that_is_not_due(tmp_path: Path, flag: str, event: str) -> None:
    def ask(state: Any, control: TrainerControl, **_: Any) -> None:
        setattr(control, flag, state.global_step in (2, 5))

    recorder = Recorder(on_step_end=ask)
    quiet_trainer(
        tmp_path, ScalarModel(), scalars(*range(7)), recorder, trainer_options={"eval_dataset": scalars(1)}
    ).train()
    assert recorder.steps(event) == [2, 5] + ([7] if event == "on_log" else [])


def test_callbacks_may_extend_a_log_record(tmp_path: Path) -> None:
    recorder = Recorder(on_log_step=lambda logs, **_: logs.update(extra=7))
    trainer = quiet_trainer(tmp_path, ScalarModel(), scalars(1), recorder, logging_strategy="steps")
    trainer.train()
    assert recorder.logs[0][1]["extra"] == 7
    assert trainer.state.log_history[0]["extra"] == 7


def test_callbacks_are_added_and_removed(tmp_path: Path) -> None:
    trainer: Trainer = quiet_trainer(tmp_path, ScalarModel(), scalars(1))
    kept, given_back, removed = Recorder(), StopsInPlace(), StopsByReturn()
    for callback in (kept, given_back, removed, StopsByReturn):
        trainer.add_callback(callback)
    assert isinstance(trainer.callbacks[3], StopsByReturn)
    assert trainer.pop_callback(StopsInPlace) is given_back
    assert trainer.pop_callback(StopsInPlace) is None
    trainer.remove_callback(removed)
    assert removed not in trainer.callbacks and len(trainer.callbacks) == 2
    trainer.remove_callback(StopsByReturn)
    assert trainer.callbacks == [kept]
    trainer.train()
    assert kept.names[-1] == "on_train_end"


def test_callback_added_during_training_gets_the_next_events(tmp_path: Path) -> None:
    late = Recorder()
    early = Recorder(
        on_step_end=lambda state, trainer, **_: trainer.add_callback(late) if state.global_step == 1 else None
    )
    quiet_trainer(tmp_path, ScalarModel(), scalars(1, 2, 3), early).train()
    assert late.steps("on_step_end") == [2, 3]


def test_handler_reports_whether_an_event_has_listeners() -> None:
    handler = CallbackHandler([StopsInPlace()])
    assert handler.listens("on_log")
    assert not handler.listens("on_step_end")
