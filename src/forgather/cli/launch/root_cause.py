"""Which of the processes that failed is the cause, and what it said of it."""

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

# An error that the ranks agreed on, which may have a name of its own, tells of the rank that it comes from.
_AGREED = re.compile(r"\w+: rank (\d+) failed (during .*?)\n\nTraceback of rank \1:\n(.*)", re.DOTALL)
# What the others say when a rank is gone.
_CONSEQUENCES = ("contact with the other ranks was lost", "Connection closed by peer", "Connection reset by peer")
_USAGE_ERROR = "UsageError: "


@dataclass(frozen=True)
class RootCause:
    """The failure that came before all others."""

    rank: int
    what: str
    """What the rank did, as a sentence that begins with it."""
    traceback: str
    usage_error: str | None = None

    def sentence(self) -> str:
        """What happened, to be read below the traceback."""
        return f"rank {self.rank} {self.what}"


def find_root_cause(failures: Mapping[int, ProcessFailure]) -> RootCause:
    """The cause among the failures by rank: a process that was killed, else the first whose error is its own."""
    rank = min(failures, key=lambda one: (_distance(failures[one]), failures[one].timestamp, one))
    failure = failures[rank]
    message, traceback = _said(failure)
    agreed = _AGREED.fullmatch(message)
    if agreed is not None:
        return RootCause(int(agreed[1]), f"failed {_sentence(agreed[2])}", agreed[3])
    if message.startswith(_USAGE_ERROR):
        return RootCause(rank, "", traceback, message.removeprefix(_USAGE_ERROR))
    if failure.exitcode < 0:
        return RootCause(rank, f"was ended by {failure.signal_name()}.{_reason(failure)}", traceback)
    if not message:
        return RootCause(rank, f"ended with exit code {failure.exitcode} and left no word why.", traceback)
    return RootCause(rank, f"failed: {_sentence(message)}", traceback)


def _distance(failure: ProcessFailure) -> int:
    """How far a failure is from the cause."""
    if failure.exitcode == -signal.SIGTERM:
        # The agent ends the other workers so.
        return 2
    return 1 if any(text in _said(failure)[0] for text in _CONSEQUENCES) else 0


def _said(failure: ProcessFailure) -> tuple[str, str]:
    """The message and the traceback that the process has recorded; both empty when it had no time to."""
    recorded: object = failure.error_file_data.get("message")
    if not isinstance(recorded, Mapping):
        return "", ""
    return str(recorded.get("message", "")), str(recorded.get("extraInfo", {}).get("py_callstack", ""))


def _sentence(message: str) -> str:
    """The first line, which is what fits below a traceback that has all of it."""
    line = message.strip().split("\n")[0]
    return line if line.endswith((".", "!", "?")) else f"{line}."


def _reason(failure: ProcessFailure) -> str:
    is_killed = failure.exitcode == -signal.SIGKILL
    return " Systems end processes so when there is no memory left." if is_killed else ""
