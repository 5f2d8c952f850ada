"""Reports: services by name, a missing package as an error at construction, and progress without bars."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from forgather.ml.trainer.callbacks.progress import ProgressCallback
from forgather.ml.trainer.callbacks.tensorboard import TBLogger
from forgather.ml.trainer.trainer import Trainer
from tests.support.tiny_models import TokenModel, token_samples


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def trainer(folder: Path, callbacks: list[Any] | None = None, **settings: Any) -> Trainer:
    usual = {"output_dir": str(folder), "use_cpu": True, "save_strategy": "no", "logging_steps": 1, "max_steps": 2}
    return Trainer(
        args={**usual, **settings}, model=TokenModel(), train_dataset=token_samples(4), callbacks=callbacks or []
    )


@pytest.mark.parametrize("names", ["tensorboard", ["tensorboard"], "all"])
def test_tensorboard_is_written(names: Any, tmp_path: Path) -> None:
    made = trainer(tmp_path, report_to=names)
    assert sum(isinstance(one, TBLogger) for one in made.callbacks) == 1
    made.train()
    assert list(tmp_path.glob("runs/*/events.out.tfevents.*"))


@pytest.mark.parametrize("names", [None, "none", [], ["none"]])
def test_nothing_is_reported_by_default(names: Any, tmp_path: Path) -> None:
    made = trainer(tmp_path, report_to=names)
    assert made.args.report_to == [] and not any(isinstance(one, TBLogger) for one in made.callbacks)


def test_callback_of_the_user_is_not_added_twice(tmp_path: Path) -> None:
    own = TBLogger()
    made = trainer(tmp_path, [own], report_to="tensorboard")
    assert [one for one in made.callbacks if isinstance(one, TBLogger)] == [own]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wandb", r"pip install .forgather\[wandb\]."),
        ("mlflow", r"pip install .forgather\[mlflow\]."),
        ("diary", "choose from .*tensorboard.*wandb"),
    ],
)
def test_missing_service_is_an_error_at_construction(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"report_to='{name}' .*{words}"):
        trainer(tmp_path, report_to=name)


@pytest.mark.parametrize(("disabled", "draws"), [(None, True), (False, True), (True, False)])
def test_disabled_bars_leave_the_lines(disabled: bool | None, draws: bool, tmp_path: Path) -> None:
    made = trainer(tmp_path, disable_tqdm=disabled)
    (progress,) = (one for one in made.callbacks if isinstance(one, ProgressCallback))
    assert progress.draws is draws
    text = Terminal()
    progress._console = Console(file=text, force_terminal=True, width=100)
    made.train()
    assert "loss" in text.getvalue()
    # Bars hide the cursor while they are drawn.
    assert ("\x1b[?25l" in text.getvalue()) is draws
