"""Restart policy: failures are noted, a repeated one goes back a checkpoint, and the third ends the job."""

import json
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forgather.ml.trainer.elastic.failure_notes import FILE_NAME, failure_of, note_failure, read_failures
from forgather.ml.trainer.elastic.restart_policy import RepeatedFailureError, judge
from forgather.ml.trainer.loop.signals import Preempted
from forgather.ml.trainer.trainer_types import TrainerCallback
from tests.guarantees.elastic.test_lost_nodes import needs_elastic
from tests.support.data_parallel import ddp_trainer
from tests.support.launch import kill_leftovers
from tests.support.ranks import outcomes_on_ranks
from tests.support.sampling import long_search
from tests.support.tiny_models import ScalarModel, quiet_trainer, scalars
from tests.unit.cli.program import write_tiny_run
from tests.unit.cli.test_launch import PROGRAM, finish, start

POLICY = "forgather.ml.trainer.elastic.restart_policy"


class Fails(TrainerCallback):
    """Raises after a step; the number in the message differs each time."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise ValueError(f"sample {id(self)} is damaged")


def attempt(output_dir: Path, fails_at: int | None, max_steps: int = 8, **settings: Any) -> Any:
    settings = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": None, **settings}
    trainer = quiet_trainer(
        output_dir, ScalarModel(), scalars(*range(20)), Fails(fails_at), max_steps=max_steps, **settings
    )
    trainer.train()
    return trainer


def fail(output_dir: Path, step: int, **settings: Any) -> None:
    with pytest.raises(ValueError, match="damaged"):
        attempt(output_dir, step, **settings)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    kill_leftovers()


def test_same_failure_goes_back_one_checkpoint_and_then_ends_the_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger=POLICY)
    for _ in range(2):
        fail(tmp_path, 5)
    first, second = read_failures(tmp_path.as_posix())
    assert first.key == second.key and first.attempt != second.attempt
    assert (first.step, first.rank, first.error_type, first.resumed_from) == (5, 0, "ValueError", None)
    assert second.resumed_from is not None and second.resumed_from.endswith("checkpoint-4")
    assert "The last attempt failed: ValueError at step 5 on rank 0" in caplog.text
    fail(tmp_path, 5)
    assert "Going back one checkpoint, from" in caplog.text
    assert str(read_failures(tmp_path.as_posix())[-1].resumed_from).endswith("checkpoint-2")
    with pytest.raises(RepeatedFailureError, match=r"ended 3 attempts at step 5.*remove .*failures.jsonl to resume"):
        attempt(tmp_path, None)
    # An explicit path is never changed.
    attempt(tmp_path, None, resume_from_checkpoint=str(tmp_path / "checkpoints/checkpoint-4"))


def test_progress_beyond_the_failure_resets_the_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger=POLICY)
    for _ in range(2):
        fail(tmp_path, 5)
    attempt(tmp_path, None, max_steps=8)
    caplog.clear()
    assert attempt(tmp_path, None, max_steps=10).state.global_step == 10 and not caplog.text
    fail(tmp_path, 11, max_steps=20)
    attempt(tmp_path, None, max_steps=20)
    assert "Going back" not in caplog.text and caplog.text.count("The last attempt failed") == 1


def test_preemption_and_interrupts_are_no_failures(tmp_path: Path) -> None:
    class Stops(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = quiet_trainer(tmp_path, ScalarModel(), scalars(*range(20)), Stops(), max_steps=4)
    with pytest.raises(Preempted):
        trainer.train()
    assert not (tmp_path / FILE_NAME).exists()


def test_failure_of_a_rank_is_noted_once(tmp_path: Path) -> None:
    outcomes = outcomes_on_ranks(_fail_on_ranks, 2, tmp_path)
    assert all(outcome.failed for outcome in outcomes)
    (failure,) = read_failures(tmp_path.as_posix())
    assert (failure.step, failure.error_type) == (3, "ValueError")


def _fail_on_ranks(output_dir: Path) -> None:
    ddp_trainer(output_dir, ScalarModel(), scalars(*range(20)), Fails(3), max_steps=6).train()


def test_damaged_lines_are_skipped_and_the_file_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    progress = {"attempt": "a", "step": 3, "resumed_from": None}
    line = json.dumps({**vars(failure_of(progress, 1, "KeyError", "x")), "attempt": "b"})
    bad = ["{", "[]", "null", '{"time": 3}', line.replace('"step": 3', '"step": "3"'), "\x00" * 9, "[" * 9000]
    (tmp_path / FILE_NAME).write_text("\n".join([*bad, line]) + "\n")
    assert [one.attempt for one in read_failures(tmp_path.as_posix())] == ["b"]
    assert "7 damaged line(s)" in caplog.text
    (tmp_path / FILE_NAME).write_text((line + "\n") * 1500)
    note_failure(tmp_path.as_posix(), failure_of(progress, 0, "KeyError", "y"))
    failures = read_failures(tmp_path.as_posix())
    assert len(failures) == 1000 and failures[-1].attempt == "a"
    assert (tmp_path / FILE_NAME).read_text().count("\n") == 1000


def test_verdict_counts_attempts_and_not_ranks() -> None:
    def failed(number: int, step: int = 5, message: str = "lost 3 samples") -> Any:
        return failure_of({"attempt": str(number), "step": step}, number, "ValueError", message)

    verdict = judge([failed(1), failed(1), failed(2)], 4)
    assert verdict is not None and verdict.num_attempts == 2
    verdict = judge([failed(1), failed(2, 6), failed(3)], 5)
    assert verdict is not None and verdict.num_attempts == 1
    assert judge([failed(1), failed(2)], 6) is None and judge([], 0) is None
    assert failed(1, message="lost 7 samples").key == failed(1).key != failed(1, message="other").key


KILLED = """\
import os, signal
from forgather.ml.trainer.trainer_types import TrainerCallback

class Killed(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if os.environ["RANK"] == "1" and state.global_step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def run_killed(folder: Path, num_restarts: int, code: int) -> str:
    write_tiny_run(folder)
    (folder / "killed.py").write_text(KILLED)
    words = ("--trainer", "ddp", "--nproc", "2", "--max-restarts", str(num_restarts))
    options = ("--callbacks", "[{class_path: killed.Killed}]", "--args.eval_strategy", "no", "--args.save_steps", "1")
    return finish(start(folder, *PROGRAM, *words, *options), code)


def noted(folder: Path) -> list[tuple[int, int, str]]:
    return [(one.step, one.rank, one.error_type) for one in read_failures((folder / "out").as_posix())]


@long_search
def test_launcher_notes_a_killed_worker(tmp_path: Path) -> None:
    run_killed(tmp_path, 0, 1)
    assert noted(tmp_path) == [(3, 1, "SIGKILL")]


@needs_elastic
def test_launcher_stops_restarting_after_three_kills_at_one_step(tmp_path: Path) -> None:
    output = run_killed(tmp_path, 9, 3)
    assert noted(tmp_path) == [(3, 1, "SIGKILL")] * 3
    assert "Restarting (3 of 9)" in output and "Restarting (4 of 9)" not in output
    assert "Going back one checkpoint" in output and "has ended 3 attempts at step 3" in output
