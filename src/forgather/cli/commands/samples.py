"""Command `forgather samples`: option parsing for the samples of a step of a run.

Imports no torch until the options are valid; `work/samples.py` does the work.
"""

from collections.abc import Sequence

from forgather.cli.command_line import DONE, CommandParser, prepare_libraries
from forgather.cli.errors import UsageError
from forgather.cli.process_setup import make_current_directory_importable

_MOST_STEPS = 10_000
_EPILOG = """\
Computed from seed, epoch and position alone: no model is built, and no data are read except for --text.
An index can be left out of a resumed run with args.skip_samples; forgather replay shows the loss of each sample.
"""


def run(words: Sequence[str]) -> int:
    """Run the command with the arguments after its name; returns the exit code."""
    options = parser().parse(words)
    if options is None:
        return DONE
    check_steps(options.step, options.to)
    if options.to is not None and options.to - options.step >= _MOST_STEPS:
        raise UsageError(f"--to {options.to}: at most {_MOST_STEPS} steps are listed at once.")
    prepare_libraries()
    if options.config is not None:
        # Only with --config: the current directory may have come with a run, and its code must not run unasked.
        make_current_directory_importable()
    from forgather.cli.work.samples import show_samples

    return show_samples(options)


def parser() -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser("forgather samples", "List the samples that a run trains on in a step.", _EPILOG)
    add_run_and_steps(parser)
    parser.add_argument("--text", action="store_true", help="show the text of each sample")
    parser.add_json()
    return parser


def add_run_and_steps(parser: CommandParser) -> None:
    """Add the options that `samples` and `replay` share."""
    parser.add_argument("run", metavar="RUN", help="output directory of a run, or one of its checkpoints")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="step, counted from 1 as in the log")
    parser.add_argument("--to", type=int, metavar="M", help="last step; default: only step N")
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="configuration of the run; default: the one stored in it, if it names no code to run",
    )


def check_steps(step: int, to: int | None) -> None:
    """Raise UsageError for step numbers that do not exist."""
    if step < 1:
        raise UsageError(f"--step {step}: steps are counted from 1.")
    if to is not None and to < step:
        raise UsageError(f"--to {to} precedes --step {step}.")
