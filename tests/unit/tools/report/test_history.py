"""Attempts, the steps that count, and goodput, from the lines of a run record."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from forgather.ml.trainer.callbacks.support.record_file import RecordFile, read_lines
from forgather.tools.report import contents, history, write_report


def line(kind: str, time: float, step: int, **values: Any) -> dict[str, Any]:
    return {"kind": kind, "time": time, "step": step, **values}


# A start at 110 s of a process from 100 s; killed after step 6; resumed at step 4 by a process from 140 s.
KILLED = [
    line("start", 110.0, 0, attempt="a", process_started=100.0, host="elsewhere", pid=1),
    line("log", 112.0, 2, loss=4.0, busy=2.0, memory=[10, 20]),
    line("log", 114.0, 4, loss=3.0, busy=4.0, memory=[10, 20]),
    line("save", 115.0, 4, name="checkpoint-4", busy=4.0),
    line("log", 117.0, 6, loss=2.5, busy=6.0, memory=[10, 20]),
    line(
        "start", 150.0, 4, attempt="b", process_started=140.0, resumed_from="out/checkpoint-4", host="elsewhere", pid=1
    ),
    line("log", 152.0, 6, loss=2.0, busy=2.0, memory=[10, 30]),
    line("log", 154.0, 8, loss=1.0, busy=4.0, memory=[10, 30]),
    line("end", 160.0, 8, reason="finished", busy=4.0),
]


def test_steps_done_again_do_not_count() -> None:
    points = history.curves(history.split(KILLED))["loss"]
    assert [(one.step, one.value) for one in points if one.counts] == [(2, 4.0), (4, 3.0), (6, 2.0), (8, 1.0)]
    assert [(one.step, one.value) for one in points if not one.counts] == [(6, 2.5)]


def test_killed_and_resumed_attempts_are_told_apart() -> None:
    found = history.attempts(history.split(KILLED), [], now=1000.0)
    assert [(one.outcome, one.first_step, one.last_step, one.counts_until) for one in found] == [
        (contents.KILLED, 0, 6, 4),
        (contents.FINISHED, 4, 8, 8),
    ]
    assert found[1].resumed_from == "checkpoint-4"
    assert [(one.kind, one.step) for one in history.events(found, [], [])] == [("killed", 6), ("restart", 4)]


def test_goodput_counts_only_the_time_of_steps_that_count() -> None:
    parts = history.split(KILLED)
    found = history.goodput(parts, history.attempts(parts, [], now=1000.0))
    assert found is not None
    # 60 s of wall time: 4 s + 4 s in steps that count, 2 s lost, 1 s + 6 s else, twice 10 s set-up, 23 s between.
    assert (found.wall, found.counting, found.repeated) == (60.0, 8.0, 2.0)
    assert (found.other, found.setup, found.down) == (7.0, 20.0, 23.0)
    assert found.share == pytest.approx(8 / 60)


def test_a_run_that_wrote_recently_on_another_machine_is_running() -> None:
    parts = history.split(KILLED[:5])
    assert history.attempts(parts, [], now=120.0)[-1].outcome == contents.RUNNING
    assert history.attempts(parts, [], now=5000.0)[-1].outcome == contents.KILLED


def test_memory_of_each_rank() -> None:
    assert [[one.value for one in rank] for rank in history.memory_curves(history.split(KILLED))] == [
        [10, 10, 10, 10, 10],
        [20, 20, 20, 30, 30],
    ]


def test_record_survives_an_incomplete_line_and_keeps_nan(tmp_path: Any) -> None:
    file = RecordFile(str(tmp_path))
    file.append(line("log", 1.0, 1, loss=math.nan))
    with open(file.path, "a") as raw:
        raw.write('{"kind": "log", "time"')
    file.append(line("log", 2.0, 2, loss=-math.inf))
    first, second = read_lines(file.path)
    assert math.isnan(first["loss"]) and second["loss"] == -math.inf


def test_record_stays_bounded_and_keeps_spikes(tmp_path: Any) -> None:
    file = RecordFile(str(tmp_path), most_bytes=20_000)
    file.append(line("start", 0.0, 0, attempt="a"))
    for step in range(1, 1500):
        file.append(line("log", float(step), step, loss=99.0 if step == 123 else 1.0 + step / 1e4))
        assert (tmp_path / "run_record.jsonl").stat().st_size <= 20_200
    lines = read_lines(file.path)
    assert lines[0]["kind"] == "start" and lines[-1]["step"] == 1499
    assert 123 in [one["step"] for one in lines] and len(lines) > 50


SLOT = [0, "forward", 0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("start", "process_started", math.nan),
        ("start", "max_steps", math.nan),
        ("start", "world_size", math.inf),
        ("log", "tok_per_sec", math.nan),
        # An evaluation that diverged.
        ("evaluate", "eval_loss", math.inf),
        ("log", "loss", -math.inf),
        ("schedule", "of_step", math.nan),
        ("schedule", "n_microbatches", math.inf),
        ("schedule", "num_pipelines", math.inf),
        ("schedule", "pipelines", [{"ranks": [{"rank": math.nan, "slots": [SLOT]}]}]),
        ("schedule", "pipelines", [{"ranks": [{"slots": [[0, "forward", 0, -1e308, 1e308], SLOT]}]}]),
    ],
)
def test_values_that_are_no_number_leave_the_rest_of_the_report(
    tmp_path: Path, kind: str, key: str, value: object
) -> None:
    lines = [*KILLED[:-1], line("evaluate", 155.0, 8, eval_loss=1.0), line("log", 156.0, 8, tok_per_sec=9.0)]
    lines.append(line("schedule", 156.0, 8, pipelines=[{"ranks": [{"rank": 0, "slots": [SLOT]}]}]))
    lines.append(next(one for one in reversed(lines) if one["kind"] == kind) | {key: value})
    (tmp_path / "run_record.jsonl").write_text("".join(json.dumps(one) + "\n" for one in [*lines, KILLED[-1]]))
    assert write_report(str(tmp_path)).report.step == 8


def test_a_failure_at_an_impossible_step_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "run_record.jsonl").write_text("".join(json.dumps(one) + "\n" for one in KILLED))
    names = ("time", "attempt", "host", "error_type", "message", "fingerprint")
    failure = dict.fromkeys(names, "a") | {"rank": 0, "resumed_from": None, "step": 10**400}
    (tmp_path / "failures.jsonl").write_text(json.dumps(failure) + "\n")
    assert write_report(str(tmp_path)).report.step == 8


def test_memory_of_very_many_ranks_is_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_MOST_MEMORY_POINTS", 100)
    lines = [line("log", 112.0 + step, step, memory=[1] * 30) for step in range(10)]
    ranks = history.memory_curves(history.split(lines))
    assert len(ranks) == 30 and [one.step for one in ranks[0]] == [0, 4, 8]


def test_newest_samples_are_shown_of_very_many(tmp_path: Path) -> None:
    many = [{"prompt": str(number), "text": ""} for number in range(10_000)]
    lines = [line("samples", 112.0 + step, step, samples=many) for step in (1, 2)]
    (tmp_path / "run_record.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    samples = write_report(str(tmp_path)).report.samples
    assert [one.prompt for one in samples] == [str(number) for number in range(9_800, 10_000)]
    assert {one.step for one in samples} == {2}
