"""Writing of reports: the page by an atomic rename, the PNG, and the loop of `--watch`."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

from forgather.ml.checkpoint.files.durable import replace_file
from forgather.tools.report.contents import RunReport
from forgather.tools.report.errors import ReportError
from forgather.tools.report.page import render
from forgather.tools.report.reading import read_run

DEFAULT_NAME = "report.html"


@dataclass(frozen=True)
class WrittenReport:
    """Report and the files that were written."""

    report: RunReport
    page: str
    png: str | None


def write_report(
    output_dir: str, output: str | None = None, png: str | None = None, reload_seconds: float | None = None
) -> WrittenReport:
    """Write the report of a run and return it; the default of `output` is `<output_dir>/report.html`.

    `png` is the path of an additional image. With `reload_seconds`, the page reloads itself while the run is running.
    Raise `ReportError` if the directory has no run or a file cannot be written.
    """
    page = os.path.join(output_dir, DEFAULT_NAME) if output is None else output
    report = read_run(output_dir)
    for path in (page, png):
        _require_directory(path)
    _replace(page, render(report, None if report.is_over else reload_seconds).encode())
    if png is not None:
        from forgather.tools.report.image import draw

        _replace(png, draw(report))
    return WrittenReport(report, page, png)


def watch_report(
    output_dir: str, seconds: float, output: str | None = None, png: str | None = None
) -> Iterator[WrittenReport]:
    """Write the report every `seconds` seconds, and yield it each time, until the run has ended."""
    while True:
        written = write_report(output_dir, output, png, reload_seconds=seconds)
        yield written
        if written.report.is_over:
            return
        time.sleep(seconds)


def _require_directory(path: str | None) -> None:
    """Raise `ReportError` if the directory of a file does not exist: a mistyped path must not create it."""
    folder = None if path is None else os.path.dirname(os.path.abspath(path))
    if folder is not None and not os.path.isdir(folder):
        raise ReportError(
            f"{path} cannot be written: there is no directory {folder}. Create it, or choose another file."
        )


def _replace(path: str, content: bytes) -> None:
    try:
        replace_file(path, content)
    except OSError as error:
        raise ReportError(
            f"{path} cannot be written: {error.strerror or error}. Choose another file with --output or --png."
        ) from error
