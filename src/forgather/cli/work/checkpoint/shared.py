"""Helpers of the checkpoint commands: errors that mean wrong usage, sizes, and printable text from files."""

import contextlib
from collections.abc import Iterator

from forgather._terminal_text import printable_line
from forgather.cli.errors import UsageError
from forgather.ml.checkpoint.errors import CheckpointNotFoundError
from forgather.ml.trainer.callbacks.display import show_row


@contextlib.contextmanager
def usage_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Raise `UsageError` for paths without a checkpoint, and for other errors that a different command line avoids."""
    expected: tuple[type[Exception], ...] = (CheckpointNotFoundError, *kinds)
    try:
        yield
    except expected as error:
        raise UsageError(str(error)) from None


def row(label: str, text: object) -> None:
    """Print a label and a text that may come from a file."""
    if text is not None and text != "":
        show_row(label, printable_line(str(text)))


def shortened(text: object, limit: int = 60) -> str:
    """Return a value as text of at most `limit` characters."""
    words = printable_line(str(text))
    return words if len(words) <= limit else f"{words[: limit - 1]}…"


def shown_number(value: float) -> str:
    return f"{value:.3g}"
