"""Callback contract: three positional arguments, the rest by keyword, in the order of registration."""

from pathlib import Path
from typing import Any

import pytest

from forgather.ml.trainer.callbacks import JsonLogger
from forgather.ml.trainer.trainer_types import TrainerCallback
from tests.guarantees.trainer_contract.small_trainer import small_trainer
from tests.support.tiny_models import TokenModel, quiet_trainer, token_samples

CALLS: list[Any] = []


class OtherNames(TrainerCallback):
    """Callback with other names for the first three parameters."""

    def on_step_end(self, a: Any, s: Any, c: Any) -> None:
        CALLS.append((type(a).__name__, s.global_step, type(c).__name__))


class Choosing(TrainerCallback):
    """Callback that accepts some of the keywords."""

    def on_train_metrics(self, args: Any, state: Any, control: Any, *, loss: Any, tokens: Any, model: Any) -> None:
        CALLS.append(("metrics", float(loss) > 0, int(tokens), type(model).__name__))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, trainer: Any = None) -> None:
        CALLS.append(("log", "epoch" in logs, trainer is not None))

    def on_save(self, args: Any, state: Any, control: Any, checkpoint_path: Any = None) -> None:
        CALLS.append(("save", Path(checkpoint_path).name))


class Everything(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        CALLS.append(sorted(rest))


@pytest.fixture(autouse=True)
def no_calls() -> None:
    CALLS.clear()


def train(output_dir: Path, *callbacks: Any, **settings: Any) -> None:
    quiet_trainer(output_dir, TokenModel(), token_samples(1), *callbacks, **settings).train()


def test_first_three_arguments_are_positional(tmp_path: Path) -> None:
    train(tmp_path, OtherNames())
    assert CALLS == [("TrainingArguments", 1, "TrainerControl")]


def test_handler_receives_the_keywords_it_accepts(tmp_path: Path) -> None:
    train(tmp_path, Choosing(), logging_strategy="steps", logging_steps=1, save_strategy="steps", save_steps=1)
    assert CALLS == [
        ("metrics", True, 6, "TokenModel"),
        ("log", True, True),
        ("save", "checkpoint-1"),
        ("log", True, True),
    ]


def test_handler_with_kwargs_receives_all_keywords(tmp_path: Path) -> None:
    train(tmp_path, Everything())
    names = ["eval_dataloader", "lr_scheduler", "model", "optimizer", "processing_class", "train_dataloader", "trainer"]
    assert names == CALLS[0]


def test_callbacks_run_in_the_order_of_registration(tmp_path: Path) -> None:
    class Numbered(TrainerCallback):
        def __init__(self, number: int) -> None:
            self.number = number

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            CALLS.append(self.number)

    trainer = small_trainer(tmp_path, Numbered(1), Numbered(2), max_steps=1)
    trainer.add_callback(Numbered(3))
    trainer.train()
    assert CALLS == [1, 2, 3]


def test_library_callback_can_be_subclassed(tmp_path: Path) -> None:
    class Adding(JsonLogger):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            super().on_log(args, state, control, logs={**logs, "mine": 1}, **kwargs)

    train(tmp_path, Adding(), logging_strategy="steps", logging_steps=1)
    (path,) = tmp_path.rglob("trainer_logs.jsonl")
    assert '"mine": 1' in path.read_text()


def test_handler_with_an_incompatible_signature_is_rejected(tmp_path: Path) -> None:
    class TooFew(TrainerCallback):
        def on_step_end(self, args: Any) -> None: ...

    with pytest.raises(TypeError, match=r"TooFew\.on_step_end"):
        train(tmp_path, TooFew())


def test_transformers_callbacks_run_unchanged(tmp_path: Path) -> None:
    from transformers import TrainerCallback as Other

    class Theirs(Other):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            CALLS.append(state.global_step)
            control.should_training_stop = True
            return control

    train(tmp_path, Theirs(), max_steps=5)
    assert CALLS == [1]
