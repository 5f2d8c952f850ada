"""Command `forgather control`: option parsing for requests to a running job.

Imports no torch; `work/control.py` does the work.
"""

import argparse
from collections.abc import Sequence

from forgather.cli.command_line import DONE, CommandParser
from forgather.cli.errors import UsageError

_EPILOG = """\
requests:
  status             step, losses, speed, and the phase of each rank; --watch shows a live line
  save               save a checkpoint after the current step, and print its path
  evaluate           evaluate after the current step, and print the metrics
  stop               save and end the run, as SIGTERM does (exit code of the job: 0)
  abort              end the run without saving (exit code of the job: 1)
  stacks             Python stacks of all ranks, also of a job that is stuck
  set KEY=VALUE ...  change logging_steps, eval_steps, save_steps, save_total_limit and the like

Every rank acts after the same step. save and evaluate do not change training. Run it on the host of rank 0, as the user
of the job. Exit codes: 0 done, 1 no running job, or the request failed, 2 wrong usage or a refused setting.
"""
_REQUESTS = ("status", "save", "evaluate", "stop", "abort", "stacks", "set")
_CAN_RETURN_AT_ONCE = ("save", "stop", "abort")
_MOST_SECONDS = 1e6
_DEFAULT_PERIOD = 2.0


def run(words: Sequence[str]) -> int:
    """Run the command with the arguments after its name; returns the exit code."""
    options = parser().parse(words)
    if options is None:
        return DONE
    _check(options)
    from forgather.cli.work.control import control

    return control(options)


def parser() -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser(
        "forgather control", "Speak to a running job through a socket in its output directory.", _EPILOG
    )
    parser.add_argument("output_dir", metavar="OUTPUT_DIR", help="output directory of the job")
    parser.add_argument("request", metavar="REQUEST", choices=_REQUESTS, help=", ".join(_REQUESTS))
    parser.add_argument("settings", metavar="KEY=VALUE", nargs="*", help="new settings, for set")
    parser.add_argument("--no-wait", action="store_true", help="save, stop, abort: do not wait for the result")
    parser.add_argument(
        "--watch",
        metavar="SECONDS",
        nargs="?",
        type=float,
        const=_DEFAULT_PERIOD,
        help=f"status: show a live line until the run ends, every SECONDS (default {_DEFAULT_PERIOD:g})",
    )
    parser.add_argument("--timeout", metavar="SECONDS", type=float, help="longest wait for the answer")
    parser.add_json()
    return parser


def _check(options: argparse.Namespace) -> None:
    request = options.request
    if options.settings and request != "set":
        raise UsageError(f"forgather control: {request} takes no further words, but got {options.settings[0]!r}.")
    if request == "set" and not options.settings:
        raise UsageError("forgather control: set needs KEY=VALUE, such as logging_steps=10.")
    wrong = next((word for word in options.settings if "=" not in word.strip("=")), None)
    if wrong is not None:
        raise UsageError(f"forgather control: {wrong!r} is not KEY=VALUE, such as logging_steps=10.")
    if options.no_wait and request not in _CAN_RETURN_AT_ONCE:
        raise UsageError(f"forgather control: --no-wait is for {', '.join(_CAN_RETURN_AT_ONCE)}, not for {request}.")
    if options.watch is not None and (request != "status" or options.json or not 0 < options.watch <= _MOST_SECONDS):
        raise UsageError(
            "forgather control: --watch is for status, without --json, and takes a number of seconds above 0, at most a "
            "million."
        )
    if options.timeout is not None and not 0 < options.timeout <= _MOST_SECONDS:
        raise UsageError("forgather control: --timeout takes a number of seconds above 0, at most a million.")
