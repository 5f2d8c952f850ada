"""Helpers of the checkpoint commands: errors that mean wrong usage, shortened values, and numbers."""

import contextlib
from collections.abc import Iterator

from forgather.cli.errors import UsageError
from forgather.ml.checkpoint.errors import CheckpointNotFoundError


@contextlib.contextmanager
def usage_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Raise `UsageError` for paths without a checkpoint, and for other errors that a different command line avoids."""
    expected: tuple[type[Exception], ...] = (CheckpointNotFoundError, *kinds)
    try:
        yield
    except expected as error:
        raise UsageError(str(error)) from None


def shortened(text: object, limit: int = 60) -> str:
    """Return a value as text of at most `limit` characters."""
    words = str(text)
    return words if len(words) <= limit else f"{words[: limit - 1]}…"


def shown_number(value: float) -> str:
    return f"{value:.3g}"
