"""Command `forgather control`: printed answers, JSON, and exit codes."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.control_job import RunningJob, train, until
from tests.unit.cli.program import Answer, call, spawn


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningJob]:
    monkeypatch.setenv("COLUMNS", "200")
    with RunningJob(tmp_path / "run") as running:
        yield running


def release_when_queued(job: RunningJob, num_requests: int = 1) -> None:
    """Let the run finish when it has received the request that the test sends next."""

    def release() -> None:
        until(lambda: job.has_queued(num_requests))
        job.gate.let_pass(1000)

    threading.Thread(target=release, daemon=True).start()


def asked(capsys: pytest.CaptureFixture[str], job: RunningJob, *words: str) -> Answer:
    return call(capsys, "control", str(job.output_dir), *words)


def test_status_prints_rows_or_json(capsys: pytest.CaptureFixture[str], job: RunningJob) -> None:
    answer = asked(capsys, job, "status")
    assert answer.code == 0 and "step       0 of 8" in answer.output and "Trainer, 1 rank" in answer.output
    status = json.loads(asked(capsys, job, "status", "--json").output)
    assert status["schema"] == "forgather.control.status/1" and status["step"] == 0
    assert status["ranks"][0]["phase"] == "a callback"


def test_save_prints_only_the_path(capsys: pytest.CaptureFixture[str], job: RunningJob) -> None:
    release_when_queued(job)
    answer = asked(capsys, job, "save")
    assert (answer.code, answer.output) == (0, f"{job.output_dir}/checkpoints/checkpoint-1\n")


def test_evaluate_prints_the_metrics(capsys: pytest.CaptureFixture[str], job: RunningJob) -> None:
    release_when_queued(job)
    answer = asked(capsys, job, "evaluate", "--json")
    metrics = json.loads(answer.output)["metrics"]
    assert answer.code == 0 and metrics["eval_loss"] > 0


def test_set_prints_the_changes(capsys: pytest.CaptureFixture[str], job: RunningJob) -> None:
    release_when_queued(job)
    answer = asked(capsys, job, "set", "logging_steps=5", "args.save_total_limit=3")
    assert answer.output == "logging_steps 3 -> 5, from step 2 on\nsave_total_limit None -> 3, from step 2 on\n"


def test_no_wait_returns_at_once(capsys: pytest.CaptureFixture[str], job: RunningJob) -> None:
    answer = asked(capsys, job, "save", "--no-wait")
    assert answer.code == 0 and "queued" in answer.output


def test_stacks_are_printed_by_rank(capsys: pytest.CaptureFixture[str], job: RunningJob) -> None:
    answer = asked(capsys, job, "stacks")
    assert answer.output.startswith("=== rank 0 ===\nThread ") and "wait_for_the_test" in answer.output


def test_watch_shows_lines_until_the_run_ends(capsys: pytest.CaptureFixture[str], job: RunningJob) -> None:
    threading.Timer(0.5, job.gate.let_pass, [1000]).start()
    answer = asked(capsys, job, "status", "--watch", "0.2")
    assert answer.code == 0 and answer.output.startswith("step 0 of 8  epoch 0.00")
    assert answer.output.splitlines()[-1].startswith("the run has ended, last seen at step")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["set", "learning_rate=1"], "cannot be changed during a run"),
        (["set", "logging_steps"], "is not KEY=VALUE"),
        (["set"], "set needs KEY=VALUE"),
        (["status", "x=1"], "takes no further words"),
        (["evaluate", "--no-wait"], "--no-wait is for"),
        (["save", "--watch"], "--watch is for status"),
        (["pause"], "invalid choice"),
        (["status", "--timeout", "-1"], "above 0"),
        (["status", "--timeout", "inf"], "at most a million"),
        (["status", "--watch", "inf"], "at most a million"),
    ],
)
def test_wrong_requests_exit_with_code_2(
    capsys: pytest.CaptureFixture[str], job: RunningJob, words: list[str], message: str
) -> None:
    answer = asked(capsys, job, *words)
    assert answer.code == 2 and message in answer.errors and "Traceback" not in answer.errors


def test_without_a_job_one_line_names_the_newest_checkpoint(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    train("single", str(tmp_path / "run"))
    for request in ("status", "stop"):
        answer = call(capsys, "control", str(tmp_path / "run"), request)
        assert (answer.code, answer.output) == (1, "")
        assert answer.errors.strip() == (
            f"forgather: No job runs in {tmp_path}/run. The newest checkpoint is {tmp_path}/run/checkpoints/checkpoint-8."
        )
    answer = call(capsys, "control", str(tmp_path / "other"), "status")
    assert answer.code == 2 and "is not a directory" in answer.errors


def test_help_and_status_import_no_torch(job: RunningJob) -> None:
    program = "from forgather.cli.main import main; code = main(); assert 'torch' not in sys.modules; sys.exit(code)"
    assert spawn(Path("/"), "control", "--help", program=program).code == 0
    answer = spawn(Path("/"), "control", str(job.output_dir), "status", program=program)
    assert answer.code == 0, answer.errors


def test_abort_ends_the_run_with_code_1(capsys: pytest.CaptureFixture[str], job: RunningJob) -> None:
    def release() -> None:
        until(lambda: job.trainer.desk is None or bool(job.trainer.desk._leaving))
        job.gate.let_pass(1000)

    threading.Thread(target=release, daemon=True).start()
    answer = asked(capsys, job, "abort")
    assert answer.output == "aborted at step 1, without saving; there is no checkpoint\n"
    job.end()
    error: Any = job.error
    assert isinstance(error, SystemExit) and error.code == 1
