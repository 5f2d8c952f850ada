"""Progress bars of training and evaluation on a terminal, drawn with rich. `ProgressCallback` owns them.

Invariant: no background thread draws, because a forked dataloader worker would inherit a locked console.
"""

import logging
import sys
import time
import weakref
from collections.abc import Iterator
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from forgather.ml.trainer.callbacks.display import format_duration

# Width of the description, a short bar, the times, and the gaps between columns.
_OTHER_COLUMNS_WIDTH = 37


class _MetricsColumn(ProgressColumn):
    """Column with as many of the task's metrics as fit beside the bar and the times."""

    def __init__(self, console: Console) -> None:
        super().__init__(Column(no_wrap=True))
        self._console = console

    def render(self, task: Task) -> Text:
        available = self._console.width - _OTHER_COLUMNS_WIDTH - len(task.fields["count"])
        text = ""
        for metric in task.fields["metrics"]:
            longer = f"{text}  {metric}" if text else metric
            if len(longer) > available:
                break
            text = longer
        return Text(text)


class _TimeColumn(ProgressColumn):
    """Column with elapsed and remaining time."""

    def render(self, task: Task) -> Text:
        text = Text(format_duration(task.elapsed or 0), style="progress.elapsed")
        seconds_left = task.fields["seconds_left"]
        if seconds_left is not None:
            text += Text(" < ", style="dim") + Text(format_duration(seconds_left), style="progress.remaining")
        return text


class ProgressBars:
    """Training bar, with an evaluation bar below it. All printed text appears above them.

    No thread draws the bars. If a thread held the console's lock while a dataloader forks its workers, the workers
    would inherit a lock that is never released. Callers check `is_due` and then call `show_training` or
    `show_evaluation`.
    """

    def __init__(self, console: Console, refresh_seconds: float) -> None:
        self._console = console
        self._refresh_seconds = refresh_seconds
        self._next_refresh = 0.0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[count]}", justify="right"),
            _MetricsColumn(console),
            _TimeColumn(Column(no_wrap=True, justify="right")),
            console=console,
            auto_refresh=False,
            expand=True,
            redirect_stdout=True,
            # If stderr is a file, errors must stay in it.
            redirect_stderr=sys.stderr.isatty(),
        )
        self._redirected: list[tuple[logging.StreamHandler[Any], IO[str]]] = []
        # After an exception in training no event stops the bars, and the cursor would stay hidden.
        self._finalizer = weakref.finalize(self, _stop, self._progress, self._redirected)
        self._train_task: TaskID | None = None
        self._eval_task: TaskID | None = None
        self._start()

    def start_training(self, step: int, total: int | None) -> None:
        self._train_task = self._progress.add_task(
            "training", total=total, completed=step, count=_count(step, total), metrics=(), seconds_left=None
        )
        self._progress.refresh()

    def start_evaluation(self, total: int | None) -> None:
        self._eval_task = self._progress.add_task(
            "  evaluating", total=total, count=_count(0, total), metrics=(), seconds_left=None
        )
        self._progress.refresh()

    def end_evaluation(self) -> None:
        if self._eval_task is not None:
            self._progress.remove_task(self._eval_task)
            self._eval_task = None
            self._progress.refresh()

    @property
    def is_training(self) -> bool:
        return self._train_task is not None

    @property
    def is_evaluating(self) -> bool:
        return self._eval_task is not None

    def is_due(self) -> bool:
        return time.monotonic() >= self._next_refresh

    def show_training(self, step: int, total: int | None, seconds_left: float | None) -> None:
        self._show(self._train_task, step, total, seconds_left)

    def show_evaluation(self, num_batches: int, total: int | None) -> None:
        self._show(self._eval_task, num_batches, total, None)

    def set_metrics(self, step: int, total: int | None, metrics: tuple[str, ...]) -> None:
        """Set the metrics of the training bar, most important first. The next redraw or printed line shows them."""
        if self._train_task is not None:
            self._progress.update(self._train_task, completed=step, count=_count(step, total), metrics=metrics)

    def stop(self) -> None:
        """Draw the bars for the last time, and restore the terminal."""
        self._finalizer()

    def _show(self, task: TaskID | None, completed: int, total: int | None, seconds_left: float | None) -> None:
        if task is None:
            return
        started = time.monotonic()
        count = _count(completed, total)
        self._progress.update(task, completed=completed, total=total, count=count, seconds_left=seconds_left)
        self._progress.refresh()
        now = time.monotonic()
        # On a slow terminal a redraw may take longer than a step. This limits drawing to one percent of the time.
        self._next_refresh = now + max(self._refresh_seconds, 100 * (now - started))

    def _start(self) -> None:
        # Rich replaces sys.stdout and sys.stderr. Log handlers still hold the original streams, and their lines would
        # overwrite the bars, so they are redirected until the bars stop.
        originals = {id(sys.stdout): "stdout", id(sys.stderr): "stderr"}
        self._progress.start()
        for handler in _stream_handlers():
            name = originals.get(id(handler.stream))
            if name is not None and getattr(sys, name) is not handler.stream:
                self._redirected.append((handler, handler.stream))
                handler.setStream(getattr(sys, name))


def _stop(progress: Progress, redirected: list[tuple[logging.StreamHandler[Any], IO[str]]]) -> None:
    for handler, stream in redirected:
        handler.setStream(stream)
    redirected.clear()
    progress.stop()


def _stream_handlers() -> Iterator[logging.StreamHandler[Any]]:
    """Yield the stream handlers of all loggers, each once. File handlers are no concern of the terminal."""
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    handlers = {id(handler): handler for logger in loggers for handler in getattr(logger, "handlers", [])}
    for handler in handlers.values():
        if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
            yield handler


def _count(completed: int, total: int | None) -> str:
    return f"{completed:>{len(str(total))}}/{total}" if total else f"{completed}"
