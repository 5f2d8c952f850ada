"""Command `forgather finalize`: option parsing for the export of a checkpoint as a deployable model.

Imports no torch until the options are valid; `work/finalize.py` does the work.
"""

from collections.abc import Sequence

from forgather._suggestions import did_you_mean
from forgather.cli.command_line import DONE, CommandParser, prepare_libraries
from forgather.cli.errors import UsageError
from forgather.cli.process_setup import make_current_directory_importable
from forgather.ml.quantization import QAT_RECIPES

_EPILOG = f"""\
recipes: {", ".join(QAT_RECIPES)}.
The quantised model loads with from_pretrained of transformers, or forgather.ml.finalize.load_finalized.
"""


def run(words: Sequence[str]) -> int:
    """Run the command with the arguments after its name; returns the exit code."""
    options = parser().parse(words)
    if options is None:
        return DONE
    if options.quantize is not None and options.quantize not in QAT_RECIPES:
        raise UsageError(
            f"--quantize {options.quantize}: there is no such recipe.{did_you_mean(options.quantize, QAT_RECIPES)} Choose "
            f"from {', '.join(QAT_RECIPES)}."
        )
    prepare_libraries()
    if options.config is not None:
        # Only with --config: the current directory may have come with a checkpoint, and its code must not run unasked.
        make_current_directory_importable()
    from forgather.cli.work.finalize import finalize

    return finalize(options)


def parser() -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser(
        "forgather finalize",
        "Export the model of a checkpoint as a Hugging Face directory, optionally quantised.",
        _EPILOG,
    )
    parser.add_argument("path", metavar="PATH", help="checkpoint, or output directory of a run (newest checkpoint)")
    parser.add_argument("output", metavar="OUT", help="new directory for the model")
    parser.add_argument(
        "--quantize", metavar="RECIPE", help="quantise the linear layers and report the loss before and after"
    )
    parser.add_argument("--ema", action="store_true", help="export the averaged weights (of a run with args.ema_decay)")
    parser.add_argument(
        "--config",
        metavar="CONFIG",
        help="configuration of the run; default: the one in the checkpoint, if it names no code to run",
    )
    parser.add_argument("--no-evaluation", action="store_true", help="do not measure losses, which requires the data")
    parser.add_json()
    return parser
