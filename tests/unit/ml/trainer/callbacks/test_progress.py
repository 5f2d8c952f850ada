"""Progress output: readable on a terminal and in a file, with negligible cost per step."""

import io
import logging
import os
import pty
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from forgather.ml.trainer.callbacks import ProgressCallback, default_callbacks
from tests.unit.ml.trainer.callbacks.run import Run

SHOW_CURSOR = "\x1b[?25h"


class Terminal:
    """Pseudo-terminal that records its output."""

    def __init__(self) -> None:
        self._controller, worker = pty.openpty()
        self.file = os.fdopen(worker, "w", buffering=1)
        self._parts: list[bytes] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                self._parts.append(os.read(self._controller, 65536))
            except OSError:
                return

    def close(self) -> str:
        self.file.close()
        self._reader.join(timeout=10)
        os.close(self._controller)
        return b"".join(self._parts).decode()


@contextmanager
def terminal_as_stdout(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal.file)
    monkeypatch.setattr(sys, "stderr", terminal.file)
    yield terminal
    monkeypatch.undo()


def without_escapes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def terminal_console() -> Console:
    # Follow sys.stdout, like rich's own console.
    return Console(width=100, color_system="truecolor", _environ={"TERM": "xterm-256color"})


def full_run(run: Run) -> None:
    run.eval_dataloader = range(3)
    run.send("on_train_begin")
    run.train([3.0, 2.5, 2.0, 1.5])
    for _ in range(3):
        run.send("on_prediction_step", loss=1.0)
    run.evaluate(eval_loss=1.75, eval_runtime=0.5)
    run.train([1.0] * 6)
    run.send(
        "on_log", logs={"train_runtime": 61.0, "train_loss": 1.5, "total_tokens": 12345, "tokens_per_second": 99.0}
    )
    run.send("on_train_end")


def plain_lines(tmp_path: Path, **attributes: Any) -> list[str]:
    output = io.StringIO()
    full_run(Run(tmp_path, ProgressCallback(Console(file=output)), **attributes))
    return output.getvalue().splitlines()


def test_file_gets_one_aligned_line_per_record(tmp_path: Path) -> None:
    lines = plain_lines(tmp_path)
    assert len(lines) == 12
    steps = [line for line in lines if line.startswith("step")]
    assert len(steps) == 10
    assert steps[0].startswith("step  1/10") and steps[-1].startswith("step 10/10")
    assert len({line.index("loss") for line in lines[:-1]}) == 1
    assert len({line.index("lr") for line in steps}) == 1
    assert steps[5].endswith("left")
    assert lines[4].split()[0] == "eval" and "1.7500" in lines[4]
    assert lines[-1].startswith("done 10 steps in 1:01") and "12.3k" in lines[-1]


def test_file_gets_no_cursor_codes_even_if_ci_forces_colours(tmp_path: Path) -> None:
    output = io.StringIO()
    console = Console(file=output, _environ={"FORCE_COLOR": "1", "TERM": "xterm"})
    full_run(Run(tmp_path, ProgressCallback(console)))
    # FORCE_COLOR requests colours, not cursor movements.
    assert not re.search(r"\x1b\[[0-9;?]*[A-LN-Za-ln-z]", output.getvalue())


def test_control_characters_in_names_of_metrics_are_visible(tmp_path: Path) -> None:
    output = io.StringIO()
    run = Run(tmp_path, ProgressCallback(Console(file=output)))
    run.evaluate(**{"eval_\x1b[2Jmetric": 1.0})
    assert "\x1b" not in output.getvalue() and "[2Jmetric 1.0000" in output.getvalue()


@pytest.mark.parametrize("max_steps", [-1, 0, 2**62])
def test_run_without_a_step_limit_shows_no_remaining_time(tmp_path: Path, max_steps: int) -> None:
    lines = plain_lines(tmp_path, max_steps=max_steps)
    assert lines[0].split()[:2] == ["step", "1"]
    assert not any("left" in line for line in lines)


def test_other_ranks_print_nothing(tmp_path: Path) -> None:
    assert plain_lines(tmp_path, is_world_process_zero=False) == []


def test_interrupted_run_is_reported_as_stopped(tmp_path: Path) -> None:
    output = io.StringIO()
    run = Run(tmp_path, ProgressCallback(Console(file=output)))
    run.send("on_train_begin")
    run.train([1.0])
    run.send("on_prediction_step", loss=1.0)
    run.send("on_train_end")
    assert output.getvalue().splitlines()[-1] == "stopped at step 1"


def test_nan_and_infinite_losses_are_shown(tmp_path: Path) -> None:
    output = io.StringIO()
    run = Run(tmp_path, ProgressCallback(Console(file=output)))
    run.train([float("nan"), float("inf"), 1e-9])
    assert all(text in output.getvalue() for text in ("nan", "inf", "1.000e-09"))


def test_terminal_gets_bars_and_the_same_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal_as_stdout(monkeypatch) as terminal:
        full_run(Run(tmp_path, ProgressCallback(terminal_console(), refresh_seconds=0.0)))
        written = terminal.close()
    text = without_escapes(written)
    assert "training" in text and "evaluating" in text and "━" in text
    assert "10/10" in text and "lr 1.00e-03" in text
    assert "eval  4/10" in text and "done 10 steps" in text
    assert written.rindex(SHOW_CURSOR) > 0


def test_prints_and_log_records_appear_above_the_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal_as_stdout(monkeypatch) as terminal:
        logger = logging.getLogger("tests.progress")
        handler = logging.StreamHandler()
        logger.addHandler(handler)
        original = handler.stream
        run = Run(tmp_path, ProgressCallback(terminal_console(), refresh_seconds=0.0))
        run.send("on_train_begin")
        assert handler.stream is not original
        print("printed while training")
        logger.warning("warned while training")
        run.send("on_train_end")
        assert handler.stream is original
        assert sys.stdout is terminal.file
        logger.removeHandler(handler)
        text = without_escapes(terminal.close())
    for message in ("printed while training", "warned while training"):
        # On a separate line, followed by the redrawn bar.
        assert re.search(rf"[\r\n]{message} *[\r\n]+training", text)


def test_error_in_training_restores_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal_as_stdout(monkeypatch) as terminal:
        callback = ProgressCallback(terminal_console())
        run = Run(tmp_path, callback)
        run.send("on_train_begin")
        assert sys.stdout is not terminal.file
        del callback, run
        assert sys.stdout is terminal.file
        assert SHOW_CURSOR in terminal.close()


def test_evaluation_without_training_has_its_own_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal_as_stdout(monkeypatch) as terminal:
        run = Run(tmp_path, ProgressCallback(terminal_console(), refresh_seconds=0.0), max_eval_steps=2)
        run.eval_dataloader = range(100)
        for _ in range(2):
            run.send("on_prediction_step", loss=1.0)
        run.evaluate(eval_loss=1.75)
        assert sys.stdout is terminal.file
        text = without_escapes(terminal.close())
    assert "evaluating" in text and "/2" in text and "1.7500" in text


def test_default_callbacks_cost_less_than_twenty_microseconds_per_step(tmp_path: Path) -> None:
    run = Run(tmp_path, *default_callbacks(), max_steps=10**6)
    run.send("on_train_begin")
    events = ("on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_train_metrics", "on_step_end")
    handlers = [getattr(callback, event) for event in events for callback in run.callbacks if hasattr(callback, event)]
    keywords = {"args": run.args, "state": run.state, "control": run.control, "model": run.model, "trainer": None}

    def microseconds_per_step(num_steps: int = 5000) -> float:
        started = time.process_time()
        for _ in range(num_steps):
            run.state.global_step += 1
            for handler in handlers:
                handler(**keywords)
        return (time.process_time() - started) / num_steps * 1e6

    assert min(microseconds_per_step() for _ in range(3)) < 20
