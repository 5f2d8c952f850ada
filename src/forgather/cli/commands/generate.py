"""Command `forgather generate`: option parsing for text generation with the models of checkpoints.

Imports no torch until the options are valid; `work/generate.py` does the work.
"""

import argparse
from collections.abc import Sequence

from forgather.cli.command_line import DONE, CommandParser, prepare_libraries
from forgather.cli.errors import UsageError
from forgather.cli.process_setup import make_current_directory_importable

_TOO_MANY = 2**31
_EPILOG = """\
Text appears token by token. The texts of several checkpoints are printed side by side if the terminal is wide enough.
The model is built from the files of the checkpoint, which never run code. A model that is no transformers model needs
--config, and then the code that the configuration names runs.
"""


def run(words: Sequence[str]) -> int:
    """Run the command with the arguments after its name; returns the exit code."""
    options = parser().parse(words)
    if options is None:
        return DONE
    if not options.prompt and options.prompts_file is None:
        raise UsageError("forgather generate needs --prompt TEXT (- reads stdin) or --prompts-file FILE.")
    for name, least in (("max_new_tokens", 1), ("num_samples", 1), ("top_k", 0)):
        if not least <= getattr(options, name) < _TOO_MANY:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} {getattr(options, name)}: expected a number from {least} to {_TOO_MANY - 1:,}.")
    prepare_libraries()
    if options.config is not None:
        # Only with --config: the current directory may have come with a checkpoint, and its code must not run unasked.
        make_current_directory_importable()
    from forgather.cli.work.generate import generate

    return generate(options)


def parser() -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser(
        "forgather generate", "Generate text with the model of a checkpoint, or of several to compare them.", _EPILOG
    )
    parser.add_argument(
        "paths", metavar="PATH", nargs="+", help="checkpoint, or output directory of a run (newest checkpoint)"
    )
    parser.add_argument("--prompt", metavar="TEXT", action="append", default=[], help="text to continue; - reads stdin")
    parser.add_argument(
        "--prompts-file", metavar="FILE", help='one prompt per line, or JSON lines (.jsonl) with the key "prompt"'
    )
    _add_sampling(parser)
    parser.add_argument("--ema", action="store_true", help="use the averaged weights (of a run with args.ema_decay)")
    parser.add_argument(
        "--device", metavar="DEVICE", help="such as cpu or cuda:1; default: an accelerator if there is one"
    )
    parser.add_argument("--config", metavar="CONFIG", help="configuration of the run, for its model and tokenizer")
    parser.add_json()
    return parser


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-new-tokens", metavar="N", type=int, default=128, help="most tokens per text (128)")
    group.add_argument("--num-samples", metavar="N", type=int, default=1, help="texts per prompt (1)")
    group.add_argument(
        "--temperature", metavar="T", type=float, default=1.0, help="divides the logits (1.0); 0 is --greedy"
    )
    group.add_argument("--top-k", metavar="K", type=int, default=0, help="sample from the K most probable tokens")
    group.add_argument("--top-p", metavar="P", type=float, default=1.0, help="sample from the most probable share P")
    group.add_argument("--seed", metavar="SEED", type=int, default=0, help="sample n of a prompt uses SEED + n (0)")
    ways = group.add_mutually_exclusive_group()
    ways.add_argument("--greedy", action="store_true", help="always choose the most probable token")
    ways.add_argument("--do-sample", action="store_true", help="sample; this is the default")
