"""Display helpers for people who watch a run: the shared console, labelled rows, numbers and times, length of the run.

The callbacks and the commands of `forgather` print through here, so that all lines of a run look alike.
"""

import importlib.util
from typing import Any

import rich
from rich.console import Console
from rich.text import Text

from forgather.ml.trainer.trainer_types import NO_STEP_LIMIT, TrainerState

LABEL_WIDTH = 10
"""Columns for the label of a row; the texts begin behind it."""
_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def get_console() -> Console:
    """The console that all callbacks share: only through the same one do texts appear above a progress bar."""
    return rich.get_console()


def can_draw(console: Console) -> bool:
    """Whether bars can be redrawn in place; elsewhere (files, pipes, logs of CI) lines are written.

    CI systems ask for colours with FORCE_COLOR, which makes rich believe in a terminal: the file itself is asked.
    """
    if console.is_jupyter:
        return importlib.util.find_spec("ipywidgets") is not None
    return console.is_terminal and not console.is_dumb_terminal and console.file.isatty()


def show_row(label: str, text: str | None) -> None:
    """Print a label and its text on one line; nothing without a text."""
    if text:
        line = Text(f"{label:<{LABEL_WIDTH}} ", style="bold") + Text(text, style="default")
        get_console().print(line, soft_wrap=True)


def format_count(value: float) -> str:
    """Three digits and a unit: 950, 12.3k, 1.24B."""
    for factor, unit in _UNITS:
        # 999,950 would round to "1000k"
        if value >= factor * 0.9995:
            return f"{value / factor:#.3g}".rstrip(".") + unit
    return f"{value:.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def format_duration(seconds: float) -> str:
    """Minutes and seconds, with hours and days once there are some: 0:42, 1:02:03, 2d 03:04:05."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02d}:{minute:02d}:{second:02d}"
    if hours:
        return f"{hour}:{minute:02d}:{second:02d}"
    return f"{minute}:{second:02d}"


def planned_steps(state: TrainerState) -> int | None:
    """The step at which training ends; None without a limit."""
    return state.max_steps if 0 < state.max_steps < NO_STEP_LIMIT else None


def planned_eval_batches(state: TrainerState, eval_dataloader: Any) -> int | None:
    """The number of batches of an evaluation; None for a loader without length or limit."""
    limit = state.max_eval_steps if 0 < state.max_eval_steps < NO_STEP_LIMIT else None
    try:
        length = len(eval_dataloader)
    except TypeError:
        return limit
    return length if limit is None else min(length, limit)
