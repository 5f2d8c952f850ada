"""Work of `forgather compare`: prints the first difference of two runs, and suggests the next command."""

import argparse
import dataclasses
import os
import shlex

from forgather.cli.command_line import DONE, FAILED
from forgather.cli.errors import UsageError
from forgather.cli.output import print_json
from forgather.cli.process_setup import show_own_messages
from forgather.cli.work.summary import program_name
from forgather.ml.checkpoint.errors import CheckpointNotFoundError
from forgather.ml.trainer.callbacks.display import show_row
from forgather.tools.comparison.runs import RunComparison, compare_runs

_LABEL_WIDTH = 13
_MOST_SETTINGS = 20


def compare(options: argparse.Namespace) -> int:
    """Compare two runs as the command line requests; returns the exit code."""
    show_own_messages()
    try:
        result = compare_runs(options.first, options.second)
    except CheckpointNotFoundError as error:
        raise UsageError(str(error)) from None
    if options.json:
        print_json("compare/1", _as_data(options, result))
    else:
        _show(options, result)
    return DONE if result.are_equal and result.has_evidence else FAILED


def _as_data(options: argparse.Namespace, result: RunComparison) -> dict[str, object]:
    checkpoint = result.checkpoint
    return {
        "runs": [options.first, options.second],
        "equal": result.are_equal,
        "compared": result.has_evidence,
        "settings": None if result.settings is None else [dataclasses.asdict(one) for one in result.settings],
        "logs": {
            "last_steps": list(result.logs.last_steps),
            "num_compared": result.logs.num_compared,
            "last_compared": result.logs.last_compared,
            "equal_until": result.logs.equal_until,
            "different_intervals": result.logs.different_intervals,
            "differences": [dataclasses.asdict(one) for one in result.logs.differences],
        },
        "checkpoints": {
            "equal_steps": list(result.equal_checkpoints),
            "first_different": None if checkpoint is None else dataclasses.asdict(checkpoint),
        },
    }


def _show(options: argparse.Namespace, result: RunComparison) -> None:
    _show_settings(result)
    _show_logs(result)
    _show_checkpoints(result)
    _show_next(options, result)


def _show_settings(result: RunComparison) -> None:
    if result.settings is None:
        _row(
            "settings", "not compared: a run has no readable config.yaml (a run that was started from Python has none)"
        )
        return
    lines = [str(change) for change in result.settings[:_MOST_SETTINGS]]
    if len(result.settings) > len(lines):
        lines.append(f"and {len(result.settings) - len(lines)} more")
    _rows("settings", lines or ["equal"])


def _show_logs(result: RunComparison) -> None:
    logs = result.logs
    if not logs.num_compared:
        missing = ["A", "B"][logs.last_steps[0] is not None] if None in logs.last_steps else None
        reason = "they have no logged step in common" if missing is None else f"run {missing} has no log"
        _row("logs", f"not compared: {reason}")
        return
    lines = []
    if logs.equal_until is not None:
        lines.append(f"equal up to step {logs.equal_until}")
    for one in logs.differences:
        lines.append(f"step {one.step}: {one.name} {_number(one.first)} and {_number(one.second)}")
    if logs.different_intervals:
        lines.append("other steps were logged at different intervals, and cannot be compared")
    if logs.last_steps[0] != logs.last_steps[1]:
        lines.append(f"run A was logged up to step {logs.last_steps[0]}, run B up to step {logs.last_steps[1]}")
    _rows("logs", lines)


def _number(value: float | None) -> str:
    return "not finite" if value is None else repr(value)


def _show_checkpoints(result: RunComparison) -> None:
    difference = result.checkpoint
    lines = []
    if result.equal_checkpoints:
        lines.append(f"equal at step{_list(result.equal_checkpoints)}")
    if difference is None:
        _rows("checkpoints", lines or ["not compared: the runs have no step in common"])
        return
    values = "value differs" if difference.num_different == 1 else "values differ"
    lines.append(f"step {difference.step}: {difference.num_different} {values}, the first in model order:")
    lines += [f"  {one.component}: {one.name}: {one.what}" for one in difference.shown]
    _rows("checkpoints", lines)


def _list(steps: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, steps[-5:]))
    return f"{'' if len(steps) == 1 else 's'} {'..., ' if len(steps) > 5 else ''}{shown}"


def _show_next(options: argparse.Namespace, result: RunComparison) -> None:
    if not result.has_evidence:
        _row("result", "nothing to compare: the runs have no step in common")
        return
    if result.are_equal:
        _row("result", "equal in all that both have")
        return
    found = [one.step for one in (result.logs.first, result.checkpoint) if one is not None]
    steps = [step for step in found if step is not None]
    if not steps:
        _row("result", "different settings, equal results so far")
        return
    _row("result", f"different since step {min(steps)} at the latest")
    program = program_name()
    for path in (options.first, options.second):
        _row("try next", shlex.join([program, "replay", os.path.normpath(path), "--step", str(min(steps))]))


def _rows(label: str, lines: list[str]) -> None:
    for number, line in enumerate(lines):
        _row("" if number else label, line)


def _row(label: str, content: str) -> None:
    show_row(label, content, _LABEL_WIDTH)
