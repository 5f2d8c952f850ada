"""Attempts, the steps that count, and goodput, from the lines of a run record."""

import math
from typing import Any

import pytest

from forgather.ml.trainer.callbacks.support.record_file import RecordFile, read_lines
from forgather.tools.report import contents, history


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
