"""Root cause of a failed job: the process that failed first, with its message and traceback.

When one rank fails, the others fail too: they lose their connections, or the agent terminates them. Called by the agent
with the failures that torchelastic recorded.
"""

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from forgather._watch.watcher import EXIT_CODE as WATCH_EXIT_CODE
from forgather.ml.distributed.entry_point import SIGNS_OF_LOST_CONTACT

# A DistributedError or a subclass of it: all ranks raise it, and the text names the rank where the error began.
_AGREED = re.compile(r"\w+: rank (\d+) failed (while .*?)\n\nTraceback of rank \1:\n(.*)", re.DOTALL)
# Messages of ranks that lost contact with a failed rank.
_CONSEQUENCES = ("contact with the other ranks was lost", "Connection closed by peer", "Connection reset by peer")
_USAGE_ERROR = "UsageError: "
# Verdict of the watch over ranks. The rank that it names was often killed, and cannot speak for itself.
_HANG = "RankHang: "
# The restart policy has ended the job, because the same failure has come again and again.
_REPEATED = "RepeatedFailureError: "
REPEATED_FAILURE = 3
# `forgather control ... abort` has ended the job.
_ABORTED = "RunAborted: "


@dataclass(frozen=True)
class RootCause:
    """First failure of a job."""

    rank: int
    what: str
    """End of a sentence that begins with the rank: what happened to it."""
    traceback: str
    usage_error: str | None = None
    exit_code: int = 1
    """Exit code of the job."""
    is_aborted: bool = False
    """Whether the user has ended the job, so that no rank is to blame."""

    def sentence(self) -> str:
        """Return the sentence to print below the traceback."""
        if self.exit_code == WATCH_EXIT_CODE or self.is_aborted:
            return self.what
        return f"rank {self.rank} {self.what}"


def find_root_cause(failures: Mapping[int, ProcessFailure]) -> RootCause:
    """Return the cause among the failures by rank: the earliest failure that is not a consequence of another."""
    rank = min(failures, key=lambda one: (_distance(failures[one]), failures[one].timestamp, one))
    failure = failures[rank]
    message, traceback = _said(failure)
    agreed = _AGREED.fullmatch(message)
    if agreed is not None:
        return RootCause(int(agreed[1]), f"failed {_sentence(agreed[2])}", agreed[3])
    if message.startswith(_USAGE_ERROR):
        return RootCause(rank, "", traceback, message.removeprefix(_USAGE_ERROR))
    if message.startswith(_ABORTED):
        return RootCause(rank, _sentence(message.removeprefix(_ABORTED)), "", is_aborted=True)
    if message.startswith(_HANG):
        return RootCause(rank, _sentence(message.removeprefix(_HANG)), "", exit_code=WATCH_EXIT_CODE)
    if message.startswith(_REPEATED):
        return RootCause(rank, f"stopped: {_sentence(message.removeprefix(_REPEATED))}", "", exit_code=REPEATED_FAILURE)
    if failure.exitcode < 0:
        return RootCause(rank, f"was killed by {failure.signal_name()}.{_reason(failure)}", traceback)
    if not message:
        return RootCause(rank, f"exited with code {failure.exitcode} without an error message.", traceback)
    return RootCause(rank, f"failed: {_sentence(message)}", traceback)


def is_consequence(failure: ProcessFailure) -> bool:
    """Return whether a worker may only have lost contact with other ranks, or was terminated by its agent."""
    if (hang := hang_of(failure)) is not None:
        # A node that is gone may be the cause. The next rendezvous shows it.
        return "unreachable" in hang
    text = _said(failure)[0].lower()
    return _distance(failure) > 0 or any(sign in text for sign in (*SIGNS_OF_LOST_CONTACT, "disterror"))


def is_silent(failure: ProcessFailure) -> bool:
    """Return whether a worker died without a Python error: killed, or ended by the watch over ranks."""
    return (not _said(failure)[0] or hang_of(failure) is not None) and not is_consequence(failure)


def hang_of(failure: ProcessFailure) -> str | None:
    """Return the verdict of the watch over ranks that ended a worker; None if something else did."""
    message = _said(failure)[0]
    return message.removeprefix(_HANG) if message.startswith(_HANG) else None


def _distance(failure: ProcessFailure) -> int:
    """Return a sort key: -1 for a verdict of the watch, 0 for a cause, 1 for a lost connection, 2 if terminated."""
    if hang_of(failure) is not None:
        return -1
    if failure.exitcode == -signal.SIGTERM:
        # The agent terminates the remaining workers with SIGTERM.
        return 2
    return 1 if any(text in _said(failure)[0] for text in _CONSEQUENCES) else 0


def _said(failure: ProcessFailure) -> tuple[str, str]:
    """Return the recorded message and traceback of a process; both are empty if it was killed before recording."""
    recorded: object = failure.error_file_data.get("message")
    if not isinstance(recorded, Mapping):
        return "", ""
    return str(recorded.get("message", "")), str(recorded.get("extraInfo", {}).get("py_callstack", ""))


def _sentence(message: str) -> str:
    """Return the first line; the traceback above it contains the full message."""
    line = message.strip().split("\n")[0]
    return line if line.endswith((".", "!", "?")) else f"{line}."


def _reason(failure: ProcessFailure) -> str:
    is_killed = failure.exitcode == -signal.SIGKILL
    return " The system does this when it runs out of memory." if is_killed else ""
