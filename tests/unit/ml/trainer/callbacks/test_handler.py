"""CallbackHandler: handlers get three positional arguments and the rest by keyword, in callback order."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from forgather.ml.trainer.callbacks import JsonLogger, ProgressCallback
from forgather.ml.trainer.callbacks.handler import CallbackHandler
from forgather.ml.trainer.trainer_types import TrainerCallback, TrainerControl
from tests.support.tiny_models import ScalarModel, quiet_trainer, scalars

CONTEXT: dict[str, Any] = {"args": "the args", "state": "the state", "model": "the model", "trainer": "the trainer"}


def handler_of(*callbacks: Any, defaults: tuple[Any, ...] = ()) -> CallbackHandler:
    handler = CallbackHandler(callbacks, defaults)
    handler.context = dict(CONTEXT)
    return handler


class Notes:
    """Callback that records the arguments of its handlers."""

    def __init__(self) -> None:
        self.got: list[Any] = []


class OtherNames(Notes):
    def on_step_end(self, settings: Any, progress: Any, wishes: Any, /) -> None:
        self.got.append((settings, progress, wishes))

    def on_log(self, a: Any, s: Any, c: Any, *, logs: Any) -> None:
        self.got.append((a, s, c, logs))


class NamesSome(Notes):
    def on_log(self, args: Any, state: Any, control: Any, trainer: Any, logs: Any, nothing: Any = 7) -> None:
        self.got.append((trainer, logs, nothing))


class TakesAll(Notes):
    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.got.append(kwargs)

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        self.got.append((args, kwargs))


def test_first_three_arguments_are_positional() -> None:
    callback, control = OtherNames(), TrainerControl()
    handler = handler_of(callback)
    handler.dispatch("on_step_end", control)
    handler.dispatch("on_log", control, logs={"loss": 1.0})
    assert callback.got == [("the args", "the state", control), ("the args", "the state", control, {"loss": 1.0})]


def test_handler_gets_the_keywords_in_its_signature() -> None:
    callback = NamesSome()
    handler_of(callback).dispatch("on_log", TrainerControl(), logs={})
    assert callback.got == [("the trainer", {}, 7)]


def test_handler_with_kwargs_gets_all_keywords() -> None:
    callback, control = TakesAll(), TrainerControl()
    handler = handler_of(callback)
    handler.context = {**handler.context, "control": "is passed as the third argument"}
    handler.dispatch("on_log", control, logs={}, extra=1)
    handler.dispatch("on_save", control, model="another model")
    rest = {"model": "the model", "trainer": "the trainer"}
    assert callback.got[0] == {**rest, "logs": {}, "extra": 1}
    assert callback.got[1] == (("the args", "the state", control), {**rest, "model": "another model"})


def test_custom_event_reaches_its_handlers() -> None:
    class Listens(Notes):
        def on_merge(self, args: Any, state: Any, control: Any, parts: int) -> None:
            self.got.append(parts)

    callback = Listens()
    handler_of(callback).dispatch("on_merge", TrainerControl(), parts=3)
    assert callback.got == [3]


class Named:
    def __init__(self, name: str, seen: list[str]) -> None:
        self._name, self._seen = name, seen

    def on_step_end(self, args: Any, state: Any, control: Any) -> None:
        self._seen.append(self._name)

    on_log = on_step_end


class First(Named):
    pass


class Better(First):
    pass


def test_callbacks_run_in_registration_order() -> None:
    seen: list[str] = []
    defaults = (First("default", seen), Named("other default", seen))
    handler = handler_of(Notes(), Better("better", seen), *(_Plain(name, seen) for name in "ab"), defaults=defaults)
    handler.add(_Plain("added", seen))
    expected = ["other default", "better", "a", "b", "added"]
    for event in ("on_step_end", "on_log"):
        seen.clear()
        handler.dispatch(event, TrainerControl())
        assert seen == expected


class _Plain(TrainerCallback):
    def __init__(self, label: str, seen: list[str]) -> None:
        self._label, self._seen = label, seen

    def on_step_end(self, args: Any, state: Any, control: Any) -> None:
        self._seen.append(self._label)

    on_log = on_step_end


def test_default_callback_is_replaced_once() -> None:
    handler = CallbackHandler([ProgressCallback(), ProgressCallback()], [ProgressCallback()])
    assert len(handler.callbacks) == 2
    assert handler.pop(ProgressCallback) is not None
    handler.add(ProgressCallback())
    assert len(handler.callbacks) == 2


class Stops(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: TrainerControl) -> None:
        control.should_training_stop = control.should_abort_without_save = True

    def on_epoch_end(self, args: Any, state: Any, control: TrainerControl) -> TrainerControl:
        return TrainerControl(should_epoch_stop=True)


def test_latest_stop_request_is_recorded() -> None:
    handler, control = handler_of(Stops()), TrainerControl()
    assert handler.stop_requested_by is None
    handler.dispatch("on_epoch_end", control)
    assert handler.stop_requested_by == ("Stops", "on_epoch_end", "should_epoch_stop")
    handler.dispatch("on_step_end", control)
    assert handler.stop_requested_by == ("Stops", "on_step_end", "should_training_stop")
    handler.dispatch("on_epoch_end", control)
    assert handler.stop_requested_by == ("Stops", "on_step_end", "should_training_stop"), "the flag was set already"


def test_events_are_counted_with_and_without_listeners() -> None:
    handler, control = handler_of(OtherNames()), TrainerControl()
    assert handler.count("on_evaluate") == 0
    handler.dispatch("on_step_end", control)
    for readers in (False, True):
        handler.dispatch("on_evaluate", control, readers, metrics={})
    handler.dispatch("on_evaluate", control, metrics={})
    assert (handler.count("on_step_end"), handler.count("on_evaluate"), handler.count("on_save")) == (1, 2, 0)


# --- signatures that do not fit


class TooFew:
    def on_step_end(self, state: Any, **kwargs: Any) -> None: ...


class KeywordsOnly:
    def on_train_begin(self, **kwargs: Any) -> None: ...


class ControlByKeyword:
    def on_step_end(self, args: Any, state: Any, *, control: Any) -> None: ...


class NeedsMore:
    def on_log(self, args: Any, state: Any, control: Any, logs: Any, metrics: Any) -> None: ...


class PositionalModel:
    def on_log(self, args: Any, state: Any, control: Any, model: Any, /) -> None: ...


class InThePlaceOfControl:
    def on_evaluate(self, args: Any, state: Any, metrics: Any, **kwargs: Any) -> None: ...


class NotCallable:
    on_log = None


class WeightsByPosition:
    def on_load_model_weights(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...


class WeightsWithoutParts:
    def on_load_model_weights(self, model: nn.Module, checkpoint_path: str) -> None: ...


@pytest.mark.parametrize(
    ("callback", "problem", "remedy"),
    [
        (
            TooFew,
            r"TooFew\.on_step_end.*takes 1 positional argument",
            "def on_step_end(self, args, state, control, **kwargs)",
        ),
        (KeywordsOnly, "takes 0 positional argument", "def on_train_begin(self, args, state, control, **kwargs)"),
        (ControlByKeyword, "takes 2 positional argument", "def on_step_end(self, args, state, control, **kwargs)"),
        (NeedsMore, "on_log does not pass metrics", "def on_log(self, args, state, control, logs, **kwargs)"),
        (PositionalModel, "does not pass model", "def on_log(self, args, state, control, logs, **kwargs)"),
        (
            InThePlaceOfControl,
            "control is passed as 'metrics'",
            "def on_evaluate(self, args, state, control, metrics, **kwargs)",
        ),
        (NotCallable, "is None, which is not callable", "def on_log(self, args, state, control, logs, **kwargs)"),
        (WeightsByPosition, "missing a required", "def on_load_model_weights(self, model, checkpoint_path, **kwargs)"),
        (WeightsWithoutParts, "model_parts", "def on_load_model_weights(self, model, checkpoint_path, **kwargs)"),
    ],
)
def test_handler_with_unsuitable_signature_is_rejected_at_registration(
    callback: type, problem: str, remedy: str
) -> None:
    for register in (
        lambda: CallbackHandler([callback()]),
        lambda: CallbackHandler([], [callback()]),
        lambda: CallbackHandler([]).add(callback),
    ):
        with pytest.raises(TypeError, match=problem) as error:
            register()
        assert remedy in str(error.value)


def test_swapped_parameter_names_cause_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Swapped:
        def on_step_end(self, state: Any, args: Any, control: Any) -> None: ...

    with caplog.at_level(logging.WARNING):
        CallbackHandler([Swapped()])
    assert "gets args as its parameter 'state'" in caplog.text


def test_handlers_without_a_readable_signature_are_accepted(caplog: pytest.LogCaptureFixture) -> None:
    class Native:
        on_step_end = max

    handler_of(Native()).dispatch("on_nothing", TrainerControl())
    assert not caplog.records


# --- our own callbacks


class OwnLogger(JsonLogger):
    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().on_log(args, state, control, logs={**(logs or {}), "own": 1}, **kwargs)

    def on_evaluate(self, a: Any, s: Any, c: Any, **kwargs: Any) -> None:
        super().on_evaluate(a, s, c, **kwargs)


def test_built_in_callbacks_can_be_subclassed(tmp_path: Path) -> None:
    quiet_trainer(
        tmp_path,
        ScalarModel(),
        scalars(1, 2),
        OwnLogger(),
        trainer_options={"eval_dataset": scalars(3)},
        logging_strategy="steps",
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
    ).train()
    lines = [json.loads(line) for line in (tmp_path / "trainer_logs.jsonl").read_text().splitlines()]
    assert [line["own"] for line in lines if "loss" in line] == [1, 1]
    assert [line["step"] for line in lines if "eval_loss" in line] == [2]
