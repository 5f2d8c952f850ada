"""Command `forgather compare`: option parsing for the comparison of two runs.

Imports no torch until the options are valid; `work/compare.py` does the work.
"""

from collections.abc import Sequence

from forgather.cli.command_line import DONE, CommandParser, prepare_libraries

_EPILOG = """\
Compares what both runs have: settings, then the loss, gradient norm and learning rate of each logged step in every
bit, then the checkpoints of common steps by tensor name, up to the first that differs.
exit codes: 0 equal in all that both have; 1 different, or nothing to compare; 2 wrong usage.
"""


def run(words: Sequence[str]) -> int:
    """Run the command with the arguments after its name; returns the exit code."""
    options = parser().parse(words)
    if options is None:
        return DONE
    prepare_libraries()
    from forgather.cli.work.compare import compare

    return compare(options)


def parser() -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser("forgather compare", "Find where two runs begin to differ.", _EPILOG)
    parser.add_argument("first", metavar="RUN_A", help="output directory of a run")
    parser.add_argument("second", metavar="RUN_B", help="output directory of the other run")
    parser.add_json()
    return parser
