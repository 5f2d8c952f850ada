"""Errors of the command line, and the printing of error messages.

`UsageError` is raised by everything below `cli` and by `forgather.config`; `main` prints it and exits with code 2.
"""

from forgather._terminal_text import printable
from forgather.config.errors import UsageError as UsageError


class RunAborted(Exception):
    """Run that `forgather control ... abort` has ended; the program exits with code 1, and is not restarted."""


def complain(message: str) -> None:
    """Print an error message to stderr."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    console.print(Text("forgather: ", style="bold red") + Text(printable(message), style="default"), soft_wrap=True)
