"""`forgather report`: page, JSON, errors and watch, on real runs."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from forgather.cli.main import main
from forgather.tools.report import watch_report, write_report
from tests.unit.cli.program import PLAIN, PLAIN_MODULE, call

FAILING = """

class Failing:
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5 and not __import__("os").path.exists("failed"):
            open("failed", "w").close()
            raise RuntimeError("lost <script>alert(1)</script> the disk")
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run that fails after step 5 and is resumed from its checkpoint of step 4."""
    folder = tmp_path_factory.mktemp("run")
    # A module name of its own: other tests leave their module `plain` in sys.modules.
    settings = PLAIN.replace("max_steps: 5", "max_steps: 8").replace("plain.", "reported.")
    (folder / "plain.yaml").write_text(settings + "callbacks: [{class_path: reported.Failing}]\n")
    (folder / "reported.py").write_text(PLAIN_MODULE + FAILING)
    before, path = os.getcwd(), list(sys.path)
    os.chdir(folder)
    try:
        assert main(["train", "plain.yaml"]) == 1
        assert main(["train", "plain.yaml"]) == 0
    finally:
        os.chdir(before)
        sys.path[:] = path
    return folder / "out"


def test_report_shows_failures_restarts_and_checkpoints(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = call(capsys, "report", str(run), "--png", str(run / "curves.png"))
    assert answer.code == 0 and "finished at step 8" in answer.output and "report.html" in answer.output
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    page = (run / "report.html").read_text()
    for text in (
        "Loss over time",
        "Learning rate",
        "Memory per rank",
        "Goodput",
        "checkpoint-8",
        "best",
        "reported.Failing",
    ):
        assert text in page
    assert "RuntimeError at step 5" in page and "<script>alert" not in page
    assert 'http-equiv="refresh"' not in page and "default-src &#x27;none&#x27;" in page
    assert "http://" not in page and "https://" not in page


def test_json_has_the_data_of_the_page_and_writes_no_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = run / "report.html"
    page.unlink(missing_ok=True)
    answer = call(capsys, "report", str(run), "--json")
    data: dict[str, Any] = json.loads(answer.output)
    assert data["schema"] == "forgather.report/1" and not page.exists()
    assert (data["state"], data["step"], data["max_steps"]) == ("finished", 8, 8)
    assert [one["outcome"] for one in data["attempts"]] == ["failed", "finished"]
    assert data["attempts"][1]["resumed_from"] == "checkpoint-4"
    assert [(one["first_step"], one["last_step"], one["counts_until"]) for one in data["attempts"]] == [
        (0, 5, 4),
        (4, 8, 8),
    ]
    losses = data["series"]["loss"]
    assert [step for step, _, _, counts in losses if counts] == list(range(1, 9))
    assert {"failed", "restart", "checkpoint"} <= {event["kind"] for event in data["events"]}
    assert 0 < data["goodput"]["share"] < 1 and len(data["memory"]) == 1
    newest = [row for row in data["checkpoints"] if row["is_newest"]]
    assert [row["step"] for row in newest] == [8]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "missing", "there is no such directory"),
        (lambda folder: folder, "has nothing to report"),
    ],
    ids=["missing", "empty"],
)
def test_a_directory_without_a_run_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Any, message: str
) -> None:
    answer = call(capsys, "report", str(make(tmp_path)))
    assert answer.code == 2 and message in answer.errors and "Traceback" not in answer.errors


def test_wrong_options_are_usage_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--watch", "0"], ["--watch", "--json"], ["--page"]):
        assert call(capsys, "report", str(tmp_path), *words).code == 2


@pytest.mark.parametrize("option", ["--output", "--png"])
def test_file_in_a_missing_directory_is_refused_and_the_directory_is_not_created(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    answer = call(capsys, "report", str(run), option, str(tmp_path / "nowhere" / "x"))
    assert answer.code == 2 and f"there is no directory {tmp_path / 'nowhere'}" in " ".join(answer.errors.split())
    assert not (tmp_path / "nowhere").exists()


def test_damaged_files_do_not_stop_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run_record.jsonl").write_bytes(
        b'{"kind": "log", "time": 1e9, "step": 1, "loss": 2}\n\xff\xfe\n[]\n{"kind": "log", "time": "x", "step": 2}\n'
        b'{"kind": "start", "time": 2e9, "step": 9, "memory": {"a": 1}, "mesh": [], "summary": 3, "versions": null}\n'
        b'{"kind": "schedule", "time": 2e9, "step": 9, "pipelines": [{"ranks": [{"rank": "x", "slots": [[1, 2], "y"]}]}]}\n'
        b'{"kind": "samples", "time": 2e9, "step": 9, "samples": [1, {"text": "<marquee>"}]}\n{"kind": "log", "ti'
    )
    with (tmp_path / "run_record.jsonl").open("a") as record:
        # No float can hold this integer, and the JSON reader accepts it.
        huge = 10**400
        record.write(f'\n{{"kind": "log", "time": {huge}, "step": 9}}\n')
        record.write(f'{{"kind": "log", "time": 2e9, "step": 9, "loss": {huge}, "memory": [{huge}]}}\n')
    (tmp_path / "failures.jsonl").write_text("garbage\n")
    (tmp_path / "checkpoints" / "checkpoint-3").mkdir(parents=True)
    assert call(capsys, "report", str(tmp_path)).code == 0
    assert "<marquee>" not in (tmp_path / "report.html").read_text()


def test_logs_of_other_sources_are_read(tmp_path: Path) -> None:
    history = [{"step": 1, "loss": 3.0, "epoch": 0.1}, {"step": 2, "eval_loss": 2.5}]
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    report = write_report(str(tmp_path)).report
    assert report.source == "trainer_state.json" and set(report.series) == {"loss", "eval_loss"}
    (tmp_path / "trainer_logs.jsonl").write_text('{"step": 1, "time": 1e9, "loss": null}\n')
    assert write_report(str(tmp_path)).report.source == "trainer_logs.jsonl"


def _write_start(folder: Path) -> Path:
    """Write the record of a run that is running on another machine."""
    start = {"kind": "start", "time": time.time(), "step": 0, "attempt": "a", "host": "elsewhere", "pid": 1}
    (folder / "run_record.jsonl").write_text(json.dumps(start) + "\n")
    return folder / "run_record.jsonl"


def test_watch_rewrites_the_page_until_the_run_has_ended(tmp_path: Path) -> None:
    record = _write_start(tmp_path)
    reports = watch_report(str(tmp_path), 0.01)
    for _ in range(2):
        written = next(reports)
        assert written.report.state == "running" and 'http-equiv="refresh"' in Path(written.page).read_text()
    with record.open("a") as file:
        file.write(json.dumps({"kind": "end", "time": time.time(), "step": 3, "reason": "finished"}) + "\n")
    (last,) = list(reports)
    assert last.report.step == 3 and 'http-equiv="refresh"' not in Path(last.page).read_text()


def test_interrupted_watch_returns_130(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write_start(tmp_path)
    # A process that was started in the background ignores SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        assert call(capsys, "report", str(tmp_path), "--watch", "60").code == 130
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "report.html").exists()
