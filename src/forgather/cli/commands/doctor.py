"""Command `forgather doctor`: option parsing for the diagnosis of an installation; `work/doctor.py` prints it."""

from collections.abc import Sequence

from forgather.cli.command_line import DONE, CommandParser, prepare_libraries

_EPILOG = """\
The self-test takes about ten seconds. It trains a small model on the CPU, kills the process with SIGKILL, resumes and
compares all bits, then trains on two ranks. It writes to a temporary directory in the current one, and needs neither
network nor root rights nor a compiler.
exit codes: 0 everything works, 1 something is wrong.
"""


def run(words: Sequence[str]) -> int:
    """Run the command with the arguments after its name; returns the exit code."""
    options = parser().parse(words)
    if options is None:
        return DONE
    prepare_libraries()
    from forgather.cli.work.doctor import doctor

    return doctor(options)


def parser() -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser(
        "forgather doctor",
        "Print versions, devices, backends, resources and missing extras, and test that training works here.",
        _EPILOG,
    )
    parser.add_argument("--no-self-test", action="store_true", help="only look, train nothing")
    parser.add_json()
    return parser
