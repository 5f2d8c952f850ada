"""Command `forgather completion`: prints a completion script for a shell. Imports no torch."""

from collections.abc import Sequence

from forgather.cli.command_line import DONE, CommandParser

_SHELLS = ("bash", "zsh", "fish")
_EPILOG = """\
To try it in this shell:
  source <(forgather completion bash)          # also zsh
  forgather completion fish | source
To install it, see the first lines of the script.
"""


def run(words: Sequence[str]) -> int:
    """Run the command with the arguments after its name; returns the exit code."""
    options = parser().parse(words)
    if options is None:
        return DONE
    from forgather.cli.completion import WRITERS
    from forgather.cli.completion.specs import command_specs
    from forgather.cli.main import COMMANDS

    specs = command_specs({name: (command.module, command.summary) for name, command in COMMANDS.items()})
    print(WRITERS[options.shell](specs), end="")
    return DONE


def parser() -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser(
        "forgather completion", "Print a script that completes commands, options and paths.", _EPILOG
    )
    parser.add_argument("shell", metavar="SHELL", choices=_SHELLS, help="bash, zsh or fish")
    return parser
