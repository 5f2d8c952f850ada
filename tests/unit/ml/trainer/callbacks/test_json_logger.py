"""JSON log file: every record once, in valid JSON."""

import json
import logging
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forgather._run_files import MOST_LINE_BYTES, MOST_LOG_LINES
from forgather.ml.trainer.callbacks import JsonLogger
from forgather.ml.trainer.callbacks.json_logger import read_records
from tests.support.faults.forked import fork
from tests.unit.ml.trainer.callbacks.run import Run


def records(output_dir: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = (output_dir / "trainer_logs.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def start(output_dir: Path, global_step: int = 0) -> Run:
    run = Run(output_dir, JsonLogger(), global_step=global_step)
    run.send("on_train_begin")
    return run


def test_each_record_is_flushed_when_it_is_logged(tmp_path: Path) -> None:
    run = start(tmp_path / "new" / "directory")
    for number in (1, 2, 3):
        run.train([float(number)])
        assert [record["loss"] for record in records(tmp_path / "new" / "directory")][-1] == number


def test_records_have_step_time_and_values(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.train([2.5])
    run.evaluate(eval_loss=2.25)
    logged, evaluated = records(tmp_path)
    assert logged["step"] == 1 and logged["loss"] == 2.5 and abs(logged["time"] - time.time()) < 60
    assert evaluated["step"] == 1 and evaluated["eval_loss"] == 2.25


def test_resumed_run_replaces_records_after_the_checkpoint(tmp_path: Path) -> None:
    start(tmp_path).train([5.0, 4.0, 3.0, 2.0])
    start(tmp_path, global_step=2).train([30.0, 20.0])
    assert [(record["step"], record["loss"]) for record in records(tmp_path)] == [(1, 5), (2, 4), (3, 30), (4, 20)]


def test_unfinished_line_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    start(tmp_path).train([5.0, 4.0])
    with open(tmp_path / "trainer_logs.jsonl", "a") as file:
        file.write('{"step": 2, "loss"')
    start(tmp_path, global_step=2).train([3.0])
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize("step", ['"a"', "1.5", "true", "null", "[1]", "NaN"])
def test_lines_whose_step_is_no_integer_are_removed_as_damaged(tmp_path: Path, step: str) -> None:
    (tmp_path / "trainer_logs.jsonl").write_text(f'{{"step": 1}}\n{{"step": {step}}}\n{{}}\n{{"step": 2}}\n')
    start(tmp_path, global_step=2).train([3.0])
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3]


def test_absolute_file_name_may_be_outside_the_output_directory(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    for step in (0, 1):
        run = Run(tmp_path / "out", JsonLogger(str(tmp_path / "shared/trainer_logs.jsonl")), global_step=step)
        run.send("on_train_begin")
        run.train([5.0, 4.0])
    assert [record["step"] for record in records(tmp_path / "shared")] == [1, 2, 3]


def write_log_with_lost_evaluation(output_dir: Path) -> list[str]:
    """Write a log whose step 9 is in its middle, because a line of more than a megabyte is after it."""
    lines = [json.dumps(one) for one in ({"step": 1}, {"step": 9}, {"step": 2, "long": "x" * 2**20}, {"step": 3})]
    (output_dir / "trainer_logs.jsonl").write_text("\n".join(lines) + "\n")
    return lines


def test_long_lines_and_mode_stay_when_lines_in_the_middle_are_removed(tmp_path: Path) -> None:
    first, _, *others = write_log_with_lost_evaluation(tmp_path)
    log = tmp_path / "trainer_logs.jsonl"
    assert len(others[0]) > MOST_LINE_BYTES
    log.chmod(0o640)
    start(tmp_path, global_step=5)
    assert log.read_text().splitlines() == [first, *others]
    assert log.stat().st_mode & 0o777 == 0o640 and os.listdir(tmp_path) == [log.name]


def test_kill_while_lines_are_removed_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = write_log_with_lost_evaluation(tmp_path)
    log = tmp_path / "trainer_logs.jsonl"

    def work() -> None:
        monkeypatch.setattr(os, "fsync", lambda _: os.kill(os.getpid(), signal.SIGKILL))
        start(tmp_path, global_step=5)

    assert os.waitstatus_to_exitcode(os.waitpid(fork(work), 0)[1]) == -signal.SIGKILL
    assert log.read_text().splitlines() == lines
    start(tmp_path, global_step=5)
    assert len(log.read_text().splitlines()) == 3 and os.listdir(tmp_path) == [log.name]


def test_log_of_very_many_lines_is_read_from_its_end_and_continued_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    num_lines = 4 * MOST_LOG_LINES
    log = tmp_path / "trainer_logs.jsonl"
    log.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, num_lines + 1)))
    with caplog.at_level(logging.WARNING):
        found = [record["step"] for record in read_records(str(log))]
    assert found == list(range(found[0], num_lines + 1)) and MOST_LOG_LINES <= len(found) < 1.1 * MOST_LOG_LINES
    assert f"{log} has " in caplog.text and "what was logged before is left out" in caplog.text
    start(tmp_path, global_step=num_lines - 1)
    assert log.read_text().splitlines() == [f'{{"step": {step}}}' for step in range(1, num_lines)]


def test_fresh_run_starts_a_new_file(tmp_path: Path) -> None:
    old = start(tmp_path)
    old.evaluate(eval_loss=9.0)
    old.train([5.0])
    start(tmp_path).train([1.0])
    assert [record.get("loss") for record in records(tmp_path)] == [1.0]


def test_evaluation_before_training_is_kept(tmp_path: Path) -> None:
    run = Run(tmp_path, JsonLogger())
    run.evaluate(eval_loss=9.0)
    run.send("on_train_begin")
    run.train([5.0])
    assert [record["step"] for record in records(tmp_path)] == [0, 1]


def test_values_without_json_equivalent_become_null_and_tensors_numbers(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.log(loss=math.nan, up=math.inf, tensor=torch.tensor(1.5), array=np.float32(2.5), ranks=[1, math.nan])
    (record,) = records(tmp_path)
    assert record["loss"] is None and record["up"] is None
    assert record["tensor"] == 1.5 and record["array"] == 2.5 and record["ranks"] == [1, None]


def test_logged_evaluation_is_written_once(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.evaluate(eval_loss=2.0)
    run.send("on_log", logs={"eval_loss": 2.0, "epoch": 0.5})
    run.state.global_step = 5
    run.send("on_log", logs={"eval_loss": 1.0, "epoch": 0.7})
    run.evaluate(eval_loss=1.0)
    assert [record["eval_loss"] for record in records(tmp_path)] == [2.0, 1.0]


def test_only_rank_zero_writes(tmp_path: Path) -> None:
    run = Run(tmp_path, JsonLogger(), is_world_process_zero=False)
    run.send("on_train_begin")
    run.train([1.0])
    assert not list(tmp_path.iterdir())
