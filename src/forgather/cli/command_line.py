"""Option parsing shared by the commands: an argument parser with our errors, `--help`, `--json`, and exit codes.

Imports neither torch nor rich, so that `--help` appears at once.
"""

import argparse
from collections.abc import Sequence
from typing import NoReturn

from forgather.cli.errors import UsageError
from forgather.cli.process_setup import import_libraries_safely, share_processors, silence_libraries

DONE = 0
FAILED = 1
"""Exit code for work that failed, and for a comparison or verification that found a difference or damage."""


class CommandParser(argparse.ArgumentParser):
    """Argument parser that raises `UsageError`, so that `main` formats the message and returns exit code 2."""

    def __init__(self, prog: str, description: str, epilog: str | None = None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}. {self.prog} --help shows the options.")

    def add_json(self) -> None:
        """Add `--json`, which every command with a result has."""
        self.add_argument("--json", action="store_true", help="print the result as JSON")

    def parse(self, words: Sequence[str]) -> argparse.Namespace | None:
        """Return the options; None after `--help`, which is printed."""
        # The words after `--` are no options.
        options = words[: words.index("--")] if "--" in words else words
        if "-h" in options or "--help" in options:
            print(self.format_help(), end="")
            return None
        return self.parse_args(list(words))


def prepare_libraries() -> None:
    """Set up the process for torch and transformers; call before the first import of either."""
    silence_libraries()
    import_libraries_safely()
    share_processors()
