"""Mistakes in how the program was called, and how errors are shown."""

import difflib
from collections.abc import Iterable


class UsageError(Exception):
    """A command, an option or a configuration that cannot be used as it is; the program ends with code 2."""


def complain(message: str) -> None:
    """Say on the error stream what went wrong."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    console.print(Text("forgather: ", style="bold red") + Text(message, style="default"), soft_wrap=True)


def nearest_hint(name: str, known: Iterable[str]) -> str:
    """The known name that was probably meant, as a sentence to put behind a message; empty when none is near."""
    known = list(known)
    # A key in the wrong section, or without one, is the right one by its last part.
    last = name.lstrip("-").replace("-", "_").rpartition(".")[2]
    same = [one for one in known if "." in one and one.rpartition(".")[2] == last]
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if not nearest or (same and not nearest[0].endswith(f".{last}")):
        nearest = same[:1] or nearest
    return f" Did you mean {nearest[0]!r}?" if nearest else ""
