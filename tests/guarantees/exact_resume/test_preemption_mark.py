"""The file `preempted` tells batch scripts that a run with exit code 0 is not complete."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from forgather.ml.trainer.elastic.preemption_mark import FILE_NAME
from forgather.ml.trainer.loop.signals import Preempted
from forgather.ml.trainer.trainer_types import TrainerCallback
from tests.support.data_parallel import ddp_trainer
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import ScalarModel, quiet_trainer, scalars
from tests.unit.cli.program import call, write_plain_run


class Stops(TrainerCallback):
    """Sends a signal to its own process after step 2; None sends nothing."""

    def __init__(self, number: signal.Signals | None, aborts: bool = False) -> None:
        self.number = number
        self.aborts = aborts

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2 and self.number is not None:
            control.should_abort_without_save = self.aborts
            os.kill(os.getpid(), self.number)


def train(output_dir: Path, *stops: Any, max_steps: int = 4) -> None:
    # A checkpoint is saved before the mark, and after a resume the run goes on from there.
    quiet_trainer(
        output_dir, ScalarModel(), scalars(*range(20)), Stops(*stops), max_steps=max_steps, resume_from_checkpoint=True
    ).train()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_preempted_run_leaves_a_mark_and_the_next_start_removes_it(tmp_path: Path, number: signal.Signals) -> None:
    with pytest.raises(Preempted) as stop:
        train(tmp_path, number)
    mark = json.loads((tmp_path / FILE_NAME).read_text())
    assert mark == {"signal": number.name, "step": stop.value.step, "checkpoint": stop.value.checkpoint_path}
    assert Path(mark["checkpoint"]).is_dir()
    train(tmp_path, None)
    assert not (tmp_path / FILE_NAME).exists()


def test_interrupt_by_a_person_leaves_no_mark(tmp_path: Path) -> None:
    with pytest.raises(Preempted):
        train(tmp_path, signal.SIGINT)
    assert (tmp_path / "checkpoints").exists() and not (tmp_path / FILE_NAME).exists()


def test_run_that_a_callback_aborts_leaves_no_mark(tmp_path: Path) -> None:
    with pytest.raises(Preempted):
        train(tmp_path, signal.SIGTERM, True)
    assert not (tmp_path / FILE_NAME).exists()


def test_mark_that_cannot_be_written_keeps_the_preemption(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FILE_NAME / "in_the_way").mkdir(parents=True)

    class Blocks(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            (tmp_path / FILE_NAME / "in_the_way").mkdir(parents=True)

    trainer = quiet_trainer(tmp_path, ScalarModel(), scalars(*range(20)), Stops(signal.SIGTERM), Blocks(), max_steps=4)
    with pytest.raises(Preempted):
        trainer.train()
    assert "could not be written" in caplog.text and "start it again" in caplog.text


def test_ranks_leave_one_mark(tmp_path: Path) -> None:
    marks = run_on_ranks(_stop_on_ranks, 2, tmp_path)
    assert len(marks) == 2 and marks[0] == json.loads((tmp_path / FILE_NAME).read_text())


def _stop_on_ranks(output_dir: Path) -> dict[str, object]:
    """Send the signal to rank 1 only; returns what all ranks report."""
    number = signal.SIGUSR1 if os.environ["RANK"] == "1" else None
    trainer = ddp_trainer(output_dir, ScalarModel(), scalars(*range(20)), Stops(number), max_steps=8)
    with pytest.raises(Preempted) as stop:
        trainer.train()
    return {"signal": "SIGUSR1", "step": stop.value.step, "checkpoint": stop.value.checkpoint_path}


def test_start_of_a_finished_run_removes_the_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_plain_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert call(capsys, "train", "plain.yaml").code == 0
    (tmp_path / "out" / FILE_NAME).touch()
    answer = call(capsys, "train", "plain.yaml")
    assert answer.code == 0 and "already finished" in answer.output
    assert not (tmp_path / "out" / FILE_NAME).exists()
