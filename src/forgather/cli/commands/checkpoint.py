"""Command `forgather checkpoint`: option parsing of ls, inspect, verify, diff, export, modify and import.

Imports no torch until the options are valid; the modules in `work/checkpoint` do the work.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module

from forgather._suggestions import did_you_mean
from forgather.cli.command_line import DONE, CommandParser, prepare_libraries
from forgather.cli.errors import UsageError
from forgather.cli.process_setup import make_current_directory_importable

_PATH_HELP = "checkpoint, or output directory of a run (newest checkpoint)"


@dataclass(frozen=True)
class _Action:
    """One action of the command: its help, its options, and the module with its `run(options) -> exit code`."""

    summary: str
    add_options: Callable[[CommandParser], None]
    module: str
    epilog: str | None = None


def run(words: Sequence[str]) -> int:
    """Run the command with the arguments after its name; returns the exit code."""
    if not words or words[0] in ("-h", "--help"):
        print(_help(), end="")
        return DONE if words else 2
    name = words[0]
    action = _ACTIONS.get(name)
    if action is None:
        raise UsageError(
            f"There is no command {f'checkpoint {name}'!r}.{did_you_mean(name, _ACTIONS)} forgather checkpoint --help lists "
            "the commands."
        )
    options = _action_parser(name, CommandParser).parse(words[1:])
    if options is None:
        return DONE
    _check(options)
    prepare_libraries()
    exit_code: int = import_module(f"forgather.cli.work.checkpoint.{action.module}").run(options)
    return exit_code


def parser() -> CommandParser:
    """Return a parser with all actions as sub-commands, for completion; `run` parses with the parser of one action."""
    parser = CommandParser("forgather checkpoint", "List, inspect, verify, compare, change and convert checkpoints.")
    actions = parser.add_subparsers()
    for name, action in _ACTIONS.items():
        _action_parser(name, partial(actions.add_parser, name, help=action.summary))
    return parser


def _action_parser(name: str, make: Callable[..., CommandParser]) -> CommandParser:
    action = _ACTIONS[name]
    description = f"{action.summary[0].upper()}{action.summary[1:]}."
    parser = make(prog=f"forgather checkpoint {name}", description=description, epilog=action.epilog)
    action.add_options(parser)
    return parser


def _help() -> str:
    width = max(map(len, _ACTIONS))
    lines = "\n".join(f"  {name:<{width}}  {action.summary}" for name, action in _ACTIONS.items())
    return (
        f"usage: forgather checkpoint COMMAND [options]\n\n{lines}\n\n"
        "forgather checkpoint COMMAND --help shows the options of a command.\n"
    )


def _check(options: argparse.Namespace) -> None:
    for name in ("set", "scale"):
        for word in getattr(options, name, ()):
            if "=" not in word or word.startswith("="):
                raise UsageError(f"--{name} {word}: expected KEY=VALUE, such as --{name} optimizer.lr=0.5.")
    if getattr(options, "top", 1) < 1:
        raise UsageError(f"--top {options.top}: expected a number of 1 or more.")
    model = getattr(options, "model", None)
    if model is not None and model.endswith((".yaml", ".yml")):
        # Only with a configuration of the user: the code that it names may be in the current directory.
        make_current_directory_importable()


def _ls_options(parser: CommandParser) -> None:
    parser.add_argument(
        "path", metavar="DIR", help="output directory of a run, its folder of checkpoints, or a checkpoint"
    )
    parser.add_json()


def _inspect_options(parser: CommandParser) -> None:
    parser.add_argument("path", metavar="PATH", help=_PATH_HELP)
    parser.add_argument(
        "--tensors", action="store_true", help="list names, shapes and dtypes of weights and optimizer state"
    )
    parser.add_json()


def _verify_options(parser: CommandParser) -> None:
    parser.add_argument("path", metavar="PATH", help=_PATH_HELP)
    parser.add_argument("--all", action="store_true", help="verify all checkpoints of the run")
    parser.add_json()


def _diff_options(parser: CommandParser) -> None:
    parser.add_argument("a", metavar="A", help=_PATH_HELP)
    parser.add_argument("b", metavar="B", help="the same")
    parser.add_argument("--top", type=int, default=20, metavar="N", help="number of rows of each table (20)")
    parser.add_argument(
        "--component",
        action="append",
        metavar="KEY",
        help='compare only this component, such as model or optimizer, or "config" for the settings; may be repeated',
    )
    parser.add_json()


def _export_options(parser: CommandParser) -> None:
    parser.add_argument("path", metavar="PATH", help=_PATH_HELP)
    parser.add_argument("output", metavar="OUT", help="new directory for the model")
    parser.add_argument("--ema", action="store_true", help="export the averaged weights (of a run with args.ema_decay)")
    parser.add_json()


def _modify_options(parser: CommandParser) -> None:
    parser.add_argument("path", metavar="PATH", help=_PATH_HELP)
    parser.add_argument(
        "--output",
        metavar="OUT",
        help="new directory; default: NAME-modified beside the original, which auto-resume takes",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set args.*, config.*, optimizer.* or COMPONENT.*",
    )
    parser.add_argument(
        "--scale", action="append", default=[], metavar="KEY=FACTOR", help="multiply a number, such as optimizer.lr=0.5"
    )
    parser.add_argument("--drop", action="append", default=[], metavar="COMPONENT", help="leave a component out")
    parser.add_json()


def _import_options(parser: CommandParser) -> None:
    parser.add_argument(
        "path", metavar="PATH", help="checkpoint of transformers, accelerate or DCP, or a weights directory"
    )
    parser.add_argument("output", metavar="OUT", help="output directory of the run that will resume it")
    parser.add_argument(
        "--model",
        metavar="CONFIG|DIR",
        help="configuration of the run (.yaml), or a directory with config.json; default: config.json in PATH",
    )
    parser.add_json()


_MODIFY_EPILOG = """\
keys:
  args.KEY, config.SECTION.KEY   the configuration stored in the checkpoint; types are checked
  optimizer.OPTION               option of all parameter groups; lr also changes initial_lr and the schedule
  COMPONENT.KEY                  value of another component, such as trainer.state.best_metric
"""

_ACTIONS = {
    "ls": _Action("list the checkpoints of a run: newest, best, incomplete and why", _ls_options, "listing"),
    "inspect": _Action("show components, files, topology and settings of a checkpoint", _inspect_options, "inspection"),
    "verify": _Action("compare every file with its checksum", _verify_options, "verification"),
    "diff": _Action("compare two checkpoints by name, also of different trainers", _diff_options, "differences"),
    "export": _Action("write the model as a plain Hugging Face directory", _export_options, "export"),
    "modify": _Action("write a changed copy of a checkpoint", _modify_options, "modification", _MODIFY_EPILOG),
    "import": _Action(
        "turn a checkpoint of another program into a Forgather checkpoint", _import_options, "conversion"
    ),
}
