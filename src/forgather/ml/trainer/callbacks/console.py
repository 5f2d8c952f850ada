"""Where callbacks write for people."""

import rich
from rich.console import Console


def get_console() -> Console:
    """The console that all callbacks share: only through the same one do texts appear above a progress bar."""
    return rich.get_console()
