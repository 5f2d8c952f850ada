"""Shell completion scripts for bash, zsh and fish, generated from the parsers of the commands.

Imports no torch. A command takes part by a module-level function `parser() -> CommandParser` in its module; other
commands complete by name.
"""

from collections.abc import Callable, Sequence

from forgather.cli.completion import bash, fish, zsh
from forgather.cli.completion.specs import CommandSpec

WRITERS: dict[str, Callable[[Sequence[CommandSpec]], str]] = {
    "bash": bash.script,
    "zsh": zsh.script,
    "fish": fish.script,
}
"""Functions that write the script of a shell."""
