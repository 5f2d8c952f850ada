"""Work of `forgather report`: writes the page and prints its path, or prints the data as JSON."""

import argparse
import dataclasses
import os
from collections.abc import Iterator

from forgather.cli.command_line import DONE
from forgather.cli.errors import UsageError, complain
from forgather.cli.output import note, print_json
from forgather.ml.trainer.callbacks.display import show_row
from forgather.tools.report import ReportError, RunReport, WrittenReport, read_run, watch_report, write_report
from forgather.tools.report.contents import Point

INTERRUPTED = 130


def report(options: argparse.Namespace) -> int:
    """Write the report as the command line requests; returns the exit code."""
    try:
        return _report(options)
    except ReportError as error:
        raise UsageError(str(error)) from None


def _report(options: argparse.Namespace) -> int:
    if options.watch is not None:
        return _watch(watch_report(options.output_dir, options.watch, options.output, options.png))
    if options.json and options.output is None and options.png is None:
        # Only the data was asked for: the directory stays as it is.
        print_json("report/1", as_json(read_run(options.output_dir)))
        return DONE
    written = write_report(options.output_dir, options.output, options.png)
    if options.json:
        print_json("report/1", {**as_json(written.report), "page": written.page, "png": written.png})
        return DONE
    _show(written)
    return DONE


def _watch(reports: Iterator[WrittenReport]) -> int:
    is_first = True
    try:
        for written in reports:
            if is_first:
                _show(written)
                if not written.report.is_over:
                    note("The page is written again until the run has ended; Ctrl-C stops.")
            is_first = False
        show_row("run", f"{written.report.state} at step {written.report.step:,}")
    except KeyboardInterrupt:
        complain("interrupted; the page stays as it was written last")
        return INTERRUPTED
    return DONE


def _show(written: WrittenReport) -> None:
    run = written.report
    show_row("run", f"{run.state} at step {run.step:,}")
    if run.goodput is not None:
        show_row("goodput", f"{run.goodput.share:.1%}")
    show_row("report", os.path.abspath(written.page))
    show_row("png", None if written.png is None else os.path.abspath(written.png))
    for problem in run.problems:
        note(problem)


def as_json(run: RunReport) -> dict[str, object]:
    """Return the report as JSON types: each curve is a list of [step, time, value, counts]."""
    shallow = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
    return {name: _plain(value) for name, value in shallow.items()}


def _plain(value: object) -> object:
    if isinstance(value, Point):
        return list(value)
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _plain(item) for name, item in value._asdict().items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value
