"""Entry point of the program: runs the command, and turns its errors into messages and exit codes.

Exit codes: 0 done, or stopped by a signal after saving; 1 the work failed; 2 wrong usage; 3 the same failure again and
again; 75 a rank hung; 130 interrupted.
"""

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path and sys.path[0] == os.getcwd():
    # Python -m searches the current directory first. All but the modules imported so far come from their libraries.
    del sys.path[0]

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from forgather._suggestions import did_you_mean
from forgather.cli.errors import UsageError, complain
from forgather.cli.interrupts import noted_interrupts
from forgather.cli.launch.lifeline import end_with_launcher
from forgather.cli.launch.options import is_worker, was_started_by_us
from forgather.cli.process_setup import make_errors_printable


@dataclass(frozen=True)
class Command:
    """Command and the module with its `run(arguments) -> exit code`, imported when the command is called."""

    module: str
    summary: str


COMMANDS = {
    "train": Command("forgather.cli.commands.train", "train a model (without a configuration: the demo)"),
    "evaluate": Command("forgather.cli.commands.evaluate", "measure the evaluation loss of checkpoints"),
    "generate": Command("forgather.cli.commands.generate", "generate text with the models of checkpoints"),
    "report": Command("forgather.cli.commands.report", "write an HTML page about a run: curves, restarts, checkpoints"),
    "control": Command("forgather.cli.commands.control", "speak to a running job: status, save, evaluate, stop, ..."),
    "checkpoint": Command(
        "forgather.cli.commands.checkpoint", "list, inspect, verify, compare, export, modify and import checkpoints"
    ),
    "samples": Command("forgather.cli.commands.samples", "list the samples of a step of a run"),
    "replay": Command("forgather.cli.commands.replay", "repeat a step of a run and show what made its loss"),
    "compare": Command("forgather.cli.commands.compare", "find where two runs begin to differ"),
    "finalize": Command(
        "forgather.cli.commands.finalize", "export a checkpoint as a deployable model, optionally quantised"
    ),
    "doctor": Command("forgather.cli.commands.doctor", "check the installation: versions, devices, a self-test"),
    "completion": Command("forgather.cli.commands.completion", "print a completion script for bash, zsh or fish"),
}

_USAGE = """\
usage: forgather COMMAND [options]

{commands}

forgather COMMAND --help shows the options of a command; --debug shows the traceback of an error.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    # The option is accepted anywhere, also behind the options of a command.
    words = [word for word in words if word != "--debug"]
    end_with_launcher()
    make_errors_printable()
    with noted_interrupts() as interrupts:
        return _exit_code(words, debug, interrupts)


def _exit_code(words: list[str], debug: bool, interrupts: Sequence[int]) -> int:
    """Run the command, print its error, and return its exit code; `interrupts` has the SIGINTs so far."""
    try:
        return _run(words)
    except KeyboardInterrupt:
        return _interrupted(words)
    except UsageError as error:
        if debug:
            raise
        _tell(str(error))
        return 2
    except BrokenPipeError:
        return _output_closed()
    except Exception as error:
        if interrupts and not debug:
            return _interrupted(words)
        # Users get the message and a way to see more. In a worker the exception is raised, unless the launcher has its
        # record and prints it. An error with an own exit code explains itself.
        if debug or (is_worker() and not _is_recorded() and not hasattr(error, "exit_code")):
            raise
        _tell(f"{_describe(error)}\n(forgather --debug ... shows the traceback)")
        # 1, or the exit code of the error class.
        return int(getattr(error, "exit_code", 1))


def _interrupted(words: list[str]) -> int:
    # The launcher prints this once for all of its workers.
    if not was_started_by_us():
        is_training = words[:1] == ["train"]
        complain("interrupted; nothing was saved since the last checkpoint" if is_training else "interrupted")
    return 130


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_help(), end="")
        return 0 if words else 2
    if words[0] == "--version":
        from forgather import __version__

        print(f"forgather {__version__}")
        return 0
    command = COMMANDS.get(words[0])
    if command is None:
        raise UsageError(
            f"There is no command {words[0]!r}.{did_you_mean(words[0], COMMANDS)} forgather --help lists the commands."
        )
    exit_code: int = import_module(command.module).run(words[1:])
    return exit_code


def _help() -> str:
    width = max(len(name) for name in COMMANDS)
    return _USAGE.format(
        commands="\n".join(f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items())
    )


def _describe(error: Exception) -> str:
    """Return the message, with the error class if the message alone is not clear."""
    explains_itself = isinstance(error, (ValueError, OSError)) or type(error).__module__.startswith("forgather.")
    text = str(error)
    return text if text and explains_itself else f"{type(error).__name__}: {text}"


def _tell(message: str) -> None:
    """Print a message, unless the launcher prints it once for all processes."""
    if not _is_recorded():
        complain(message)


def _is_recorded() -> bool:
    """Return whether the error and its traceback are in torchelastic's error file, where the launcher reads them."""
    return os.path.exists(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))


def _output_closed() -> int:
    """Redirect stdout to /dev/null after the reader of a pipe, such as `head`, has closed it; returns exit code 0."""
    # Python flushes stdout at exit, which would fail again with BrokenPipeError.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
