"""Mistakes in how the program was called, and how errors are shown."""


class UsageError(Exception):
    """A command, an option or a configuration that cannot be used as it is; the program ends with code 2."""


def complain(message: str) -> None:
    """Say on the error stream what went wrong."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    console.print(Text("forgather: ", style="bold red") + Text(message, style="default"), soft_wrap=True)
