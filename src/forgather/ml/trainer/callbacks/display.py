"""Console display helpers: shared rich console, labelled rows, formats of numbers and durations, planned steps.

The callbacks and the commands of `forgather` print with these functions, for a uniform output. Control characters of
texts become visible, because a text may come from a file, a peer or a model.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

import rich
from rich.console import Console
from rich.text import Text

from forgather._terminal_text import printable_line

if TYPE_CHECKING:
    # It imports torch, which the commands that only print do not need.
    from forgather.ml.trainer.trainer_types import TrainerState

LABEL_WIDTH = 10
"""Width of the label column of a row."""
_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def get_console() -> Console:
    """Return the console that all callbacks share. Rich prints text above a progress bar only on the same console."""
    return rich.get_console()


def can_draw(console: Console) -> bool:
    """Return whether progress bars can be redrawn in place. Files, pipes and CI logs get plain lines."""
    if console.is_jupyter:
        return importlib.util.find_spec("ipywidgets") is not None
    # CI systems set FORCE_COLOR, which makes rich report a terminal. Only the file knows the truth.
    return console.is_terminal and not console.is_dumb_terminal and console.file.isatty()


def show_row(label: str, text: str | None, width: int = LABEL_WIDTH) -> None:
    """Print a label of `width` characters and its text on one line. Print nothing if the text is empty."""
    if text:
        line = Text(printable_line(f"{label:<{width}} "), style="bold")
        line.append(printable_line(text), style="default")
        get_console().print(line, soft_wrap=True)


def format_count(value: float) -> str:
    """Format a count with three digits and a unit: 950, 12.3k, 1.24B."""
    for factor, unit in _UNITS:
        # Without the margin, 999,950 would round to "1000k".
        if value >= factor * 0.9995:
            return f"{value / factor:#.3g}".rstrip(".") + unit
    return f"{value:.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def format_duration(seconds: float) -> str:
    """Format a duration, with hours and days only if needed: 0:42, 1:02:03, 2d 03:04:05."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02d}:{minute:02d}:{second:02d}"
    if hours:
        return f"{hour}:{minute:02d}:{second:02d}"
    return f"{minute}:{second:02d}"


def planned_steps(state: "TrainerState") -> int | None:
    """Return the last step of training; None without a limit."""
    return _limit(state.max_steps)


def planned_eval_batches(state: "TrainerState", eval_dataloader: Any) -> int | None:
    """Return the number of batches of an evaluation; None for a dataloader without length or limit."""
    limit = _limit(state.max_eval_steps)
    try:
        length = len(eval_dataloader)
    except TypeError:
        return limit
    return length if limit is None else min(length, limit)


def _limit(number: int) -> int | None:
    from forgather.ml.trainer.trainer_types import NO_STEP_LIMIT

    return number if 0 < number < NO_STEP_LIMIT else None
