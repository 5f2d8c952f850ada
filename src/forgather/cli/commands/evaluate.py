"""Command `forgather evaluate`: option parsing for the evaluation of checkpoints.

Keys of the configuration are options too, as in `forgather train`. Imports no torch until the options are valid;
`work/evaluate.py` does the work.
"""

from collections.abc import Sequence

from forgather.cli.command_line import DONE, CommandParser, prepare_libraries
from forgather.cli.option_words import add_configuration_keys, take_configuration_words

_EPILOG = """\
A configuration file may name code, such as a model class. A configuration that is stored in a checkpoint may not: give
the file as CONFIG if you trust it. --KEY VALUE overrides a key of the configuration: --args.max_eval_steps 10.
"""


def run(words: Sequence[str]) -> int:
    """Run the command with the arguments after its name; returns the exit code."""
    keys, others = take_configuration_words(words)
    options = _own_parser().parse(others)
    if options is None:
        return DONE
    prepare_libraries()
    from forgather.cli.work.evaluate import evaluate

    return evaluate(options, keys)


def parser() -> CommandParser:
    """Return the parser of the command, with the keys of the configuration."""
    parser = _own_parser()
    add_configuration_keys(parser)
    return parser


def _own_parser() -> CommandParser:
    parser = CommandParser(
        "forgather evaluate",
        "Measure the evaluation loss of checkpoints on one device, with the model and data of their configuration.",
        _EPILOG,
    )
    parser.add_argument(
        "path",
        metavar="PATH",
        help="configuration file, output directory of a run, or checkpoint with its configuration",
    )
    parser.add_argument(
        "--checkpoint",
        metavar="PATH",
        nargs="+",
        action="extend",
        default=[],
        help="checkpoints or output directories to evaluate; default: the newest complete checkpoint",
    )
    parser.add_argument("--all", action="store_true", help="evaluate all complete checkpoints of the run")
    parser.add_argument(
        "--ema", action="store_true", help="evaluate the averaged weights (of a run with args.ema_decay)"
    )
    parser.add_json()
    return parser
