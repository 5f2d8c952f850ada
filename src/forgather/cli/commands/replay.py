"""Command `forgather replay`: option parsing for the replay of a step, in this process or on every rank.

Imports no torch until the options are valid; `work/replay.py` does the work.
"""

import os
import tempfile
from collections.abc import Sequence

from forgather.cli.command_line import DONE, FAILED, CommandParser, prepare_libraries
from forgather.cli.commands.samples import add_run_and_steps, check_steps
from forgather.cli.errors import UsageError
from forgather.cli.launch.options import LaunchOptions, check_against_launcher, is_worker, take_launch_options
from forgather.cli.process_setup import make_current_directory_importable

VERDICT_VARIABLE = "FORGATHER_REPLAY_VERDICT"
"""Environment variable of launched workers: path of a file that they write if their gradients differ."""
_EPILOG = """\
The replay starts from the nearest checkpoint before step N, repeats the batches and the random numbers of the run, and
stops before the update of the last step. It writes nothing into RUN, so the run may train meanwhile. On the same topology
it is exact in every bit; a run of several ranks is replayed on one device, equal to about 1e-6.

--each-rank --nproc N repeats the step in N processes, each on its own device, and compares the gradients: a rank that
differs alone has a bad device. Exit code 1: the ranks differ.
"""


def run(words: Sequence[str]) -> int:
    """Run the command with the arguments after its name; returns the exit code."""
    if not is_worker():
        return _run(words)
    from forgather.ml.distributed import record_entry_point

    # Records the exception in torchelastic's error file, where the launcher reads which rank failed first, and why.
    return record_entry_point(_run)(words) or 0


def _run(words: Sequence[str]) -> int:
    launch_options, others = take_launch_options(words)
    options = parser().parse(others)
    if options is None:
        return DONE
    check_steps(options.step, options.to)
    options.without = _indices(options.without)
    if launch_options.needs_launcher and not options.each_rank:
        raise UsageError("--nproc is for --each-rank: a replay runs in one process, also for a run of several ranks.")
    if options.each_rank and (options.to is not None or options.without):
        raise UsageError("--each-rank compares one step as the run trained it: remove --to and --without.")
    if options.each_rank and not is_worker() and not launch_options.needs_launcher:
        raise UsageError("--each-rank compares several processes: add --nproc with their number, such as --nproc 2.")
    prepare_libraries()
    if launch_options.devices is not None:
        # The variable has no effect once torch has counted the devices.
        os.environ["CUDA_VISIBLE_DEVICES"] = launch_options.devices
    if is_worker():
        check_against_launcher(launch_options)
    elif launch_options.needs_launcher:
        return _launch(launch_options, words)
    if options.config is not None:
        # Only with --config: the current directory may have come with a run, and its code must not run unasked.
        make_current_directory_importable()
    from forgather.cli.work.replay import show_replay

    return show_replay(options)


def _launch(options: LaunchOptions, words: Sequence[str]) -> int:
    """Replay in several processes; returns exit code 1 if they found different gradients."""
    from forgather.cli.launch.agent import launch

    with tempfile.TemporaryDirectory(prefix="forgather-") as folder:
        # The workers inherit the variable.
        os.environ[VERDICT_VARIABLE] = os.path.join(folder, "verdict")
        code = launch(options, ["replay", *words])
        found_difference = os.path.exists(os.environ.pop(VERDICT_VARIABLE))
    return FAILED if code == DONE and found_difference else code


def _indices(text: str | None) -> list[int]:
    if text is None:
        return []
    numbers = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in numbers):
        raise UsageError(f"--without {text}: expected dataset indices, separated by commas, such as --without 3,7.")
    return [int(part) for part in numbers]


def parser() -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser(
        "forgather replay",
        "Repeat a step of a run: loss of each sample and token, gradient norms, extreme activations.",
        _EPILOG,
    )
    add_run_and_steps(parser)
    parser.add_argument(
        "--without",
        metavar="I,J",
        help="dataset indices, the column index: repeat the steps without these samples too, and show what changes",
    )
    parser.add_argument("--each-rank", action="store_true", help="repeat the step on every rank and compare gradients")
    parser.add_argument("--nproc", metavar="N", help="number of processes for --each-rank")
    parser.add_json()
    return parser
