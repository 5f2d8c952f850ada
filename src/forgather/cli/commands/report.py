"""Command `forgather report`: option parsing for the HTML report of a run. `work/report.py` does the work."""

from collections.abc import Sequence

from forgather.cli.command_line import DONE, CommandParser, prepare_libraries
from forgather.cli.errors import UsageError

_EPILOG = """\
The page needs no network. It reads run_record.jsonl, failures.jsonl, config.yaml and the checkpoints of the run; for older
runs and runs of transformers, trainer_logs.jsonl or trainer_state.json.
"""
_DEFAULT_SECONDS = 10.0


def run(words: Sequence[str]) -> int:
    """Run the command with the arguments after its name; returns the exit code."""
    options = parser().parse(words)
    if options is None:
        return DONE
    if options.watch is not None and not 0.1 <= options.watch <= 86400:
        raise UsageError(f"--watch {options.watch:g}: give a number of seconds between 0.1 and 86400.")
    if options.watch is not None and options.json:
        raise UsageError("--watch and --json cannot be combined: --watch writes pages until the run has ended.")
    prepare_libraries()
    from forgather.cli.work.report import report

    return report(options)


def parser() -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser("forgather report", "Write one self-contained HTML page about a run.", _EPILOG)
    parser.add_argument("output_dir", metavar="OUTPUT_DIR", help="output directory of a run, running or ended")
    parser.add_argument("--output", metavar="FILE", help="page to write; default: OUTPUT_DIR/report.html")
    parser.add_argument("--png", metavar="FILE", help="also draw the curves to a PNG file")
    parser.add_argument(
        "--watch",
        metavar="SECONDS",
        nargs="?",
        type=float,
        const=_DEFAULT_SECONDS,
        help="write the page again and again until the run has ended; the page reloads itself (default: every 10 s)",
    )
    parser.add_json()
    return parser
