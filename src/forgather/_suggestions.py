"""Suggestions for misspelt argument names: the "Did you mean ...?" part of error messages.

Used by the command line, the argument checks and the lazy imports. Only the standard library is imported.
"""

import difflib
from collections.abc import Iterable


def nearest_name(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the most similar known name, or None; similarities below `cutoff` (0 to 1) do not count."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=cutoff)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the nearest known name, or an empty string; append it to a message."""
    return suggest(nearest_name(name, known))


def suggest(name: str | None) -> str:
    """Return the same sentence for a name that was found by other means, or an empty string for None."""
    return "" if name is None else f" Did you mean {name!r}?"
