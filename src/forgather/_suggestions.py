"""Suggestions for misspelt names: the "Did you mean ...?" of all error messages."""

import difflib
from collections.abc import Iterable


def nearest_name(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that is most similar; None when none is similar enough (1 is equal, 0 accepts anything)."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=cutoff)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence that names the nearest known name, with a space before it to follow a message; empty without one."""
    return suggest(nearest_name(name, known))


def suggest(name: str | None) -> str:
    """The same sentence for a name that was found by other means."""
    return "" if name is None else f" Did you mean {name!r}?"
