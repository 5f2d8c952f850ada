"""Control of a running job: status, save, evaluate, stop, abort, stacks, and settings that may change during a run.

`connect(output_dir)` speaks to the job through `<output_dir>/.forgather.sock`, as its user or as root, on the same host.
`forgather control` is this module as a command. Imports no torch.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from forgather._control import messages
from forgather._control.address import SOCKET_NAME, is_trusted, peer_user, socket_status, usable_path

__all__ = [
    "Change",
    "Control",
    "ControlError",
    "Ended",
    "Evaluation",
    "NoAnswerError",
    "NoRunningJobError",
    "RankStatus",
    "RefusedError",
    "Saved",
    "Status",
    "connect",
]

_MOST_ANSWER_BYTES = 256 * 1024 * 1024
_SECONDS_BEFORE_NOTE = 2.0
_SECONDS_TO_CONNECT = 10.0
_SECONDS_BETWEEN_TRIES = 0.05
_SECONDS_FOR_THREAD = 30.0
"""Default limit of requests that the control thread of the job answers itself, whatever training does."""


class ControlError(RuntimeError):
    """Request that the job did not carry out; the message has the reason."""


class NoRunningJobError(ControlError):
    """Output directory without a running job that can be reached."""


class RefusedError(ControlError, ValueError):
    """Request that the job refuses, such as an unknown setting. Nothing was changed."""


class NoAnswerError(ControlError, TimeoutError):
    """Job that did not answer in time. It may still carry out the request."""


@dataclass(frozen=True)
class RankStatus:
    """Rank of a job: its process, and what it does now."""

    rank: int
    host: str
    pid: int
    step: int
    """Step that the rank works on."""
    phase: str
    seconds_without_progress: float | None
    stopped: bool
    """Whether a signal such as SIGSTOP has stopped the process."""


@dataclass(frozen=True)
class Status:
    """Progress of a job. Losses are those of the last log and the last evaluation."""

    output_dir: str
    trainer: str
    host: str
    pid: int
    world_size: int
    uptime: float
    """Seconds since the start of `train`."""
    phase: str
    """Phase of rank 0."""
    step: int
    """Number of completed steps."""
    max_steps: int | None
    epoch: float
    num_epochs: float
    steps_per_second: float | None
    seconds_left: float | None
    seconds_since_step: float
    loss: float | None
    loss_step: int | None
    learning_rate: float | None
    eval_loss: float | None
    eval_step: int | None
    checkpoint: str | None
    """Newest checkpoint of this run, or the one that it has resumed."""
    background_save: bool
    """Whether a background save is in progress."""
    ranks: tuple[RankStatus, ...]


@dataclass(frozen=True)
class Saved:
    """Committed checkpoint of a step."""

    step: int
    checkpoint: str


@dataclass(frozen=True)
class Evaluation:
    """Metrics of the weights after a step."""

    step: int
    metrics: dict[str, Any]


@dataclass(frozen=True)
class Change:
    """Changed setting, from the given step on."""

    name: str
    before: Any
    after: Any
    step: int


@dataclass(frozen=True)
class Ended:
    """End of a run: its last step, and its newest checkpoint."""

    step: int
    checkpoint: str | None


def connect(
    output_dir: str | os.PathLike[str],
    *,
    timeout: float | None = None,
    note: Callable[[str], None] | None = None,
) -> "Control":
    """Return a control of the job that runs in `output_dir`; raise `NoRunningJobError` if there is none.

    `timeout` limits the seconds of each request; by default, `status` and `stacks` wait 30 s, others without limit. `note`
    is called with a text when a request waits for more than 2 s.
    """
    control = Control(os.fspath(output_dir), timeout, note)
    control._open().close()
    return control


class Control:
    """Connection to a running job. Each method sends one request and waits for its answer."""

    def __init__(self, output_dir: str, timeout: float | None, note: Callable[[str], None] | None) -> None:
        self.output_dir = output_dir
        self._timeout = timeout
        self._note = note

    def status(self) -> Status:
        """Return the status of the job, also while it evaluates, saves or is stuck."""
        found = self._ask(messages.Request(messages.STATUS))
        ranks = tuple(RankStatus(**_known(RankStatus, one)) for one in found["ranks"])
        return Status(**{**_known(Status, found), "ranks": ranks})

    def save(self, *, wait: bool = True) -> Saved | None:
        """Save a checkpoint after the current step, and return it once committed; `wait=False` returns None at once."""
        found = self._ask(messages.Request(messages.SAVE, wait))
        return Saved(found["step"], found["checkpoint"]) if wait else None

    def evaluate(self) -> Evaluation:
        """Evaluate after the current step. Training continues exactly as without it."""
        found = self._ask(messages.Request(messages.EVALUATE))
        return Evaluation(found["step"], found["metrics"])

    def stop(self, *, wait: bool = True) -> Ended | None:
        """Save and end the run, as SIGTERM does; the job's exit code is 0. `wait=False` returns None at once."""
        return self._end(messages.STOP, wait)

    def abort(self, *, wait: bool = True) -> Ended | None:
        """End the run without saving; the job's exit code is 1. `wait=False` returns None at once."""
        return self._end(messages.ABORT, wait)

    def stacks(self) -> dict[int, str]:
        """Return the Python stacks of all threads of each rank, also if ranks are stuck. Nothing is stopped."""
        found = self._ask(messages.Request(messages.STACKS))
        return {int(rank): text for rank, text in found["stacks"].items()}

    def set(self, **values: object) -> tuple[Change, ...]:
        """Change settings such as `logging_steps` on all ranks after the same step. A resumed run does not keep them."""
        return self.set_all(values)

    def set_all(self, values: Mapping[str, object]) -> tuple[Change, ...]:
        """Change the settings in a mapping."""
        found = self._ask(messages.Request(messages.SET, values=dict(values)))
        changed = found["changed"].items()
        return tuple(Change(name, before, after, found["step"]) for name, (before, after) in changed)

    def _end(self, command: str, wait: bool) -> Ended | None:
        found = self._ask(messages.Request(command, wait))
        return Ended(found["step"], found["checkpoint"]) if wait else None

    # --- connection

    def _ask(self, request: messages.Request) -> dict[str, Any]:
        """Send a request and return the result of its answer."""
        is_quick = request.command in (messages.STATUS, messages.STACKS)
        seconds = _SECONDS_FOR_THREAD if self._timeout is None and is_quick else self._timeout
        deadline = None if seconds is None else time.monotonic() + seconds
        with self._open() as connection:
            lines = _Lines(connection, deadline, self._note)
            try:
                # A job that refuses this user answers and hangs up before it has read the request.
                with contextlib.suppress(BrokenPipeError):
                    connection.sendall(request.line())
                answer = lines.answer()
            except TimeoutError:
                # The control thread answers quick requests, also of a job that is stuck.
                why = _MAY_BE_STOPPED if is_quick else " It still carries out the request when it can."
                raise NoAnswerError(
                    f"The job in {self.output_dir} has not answered within {seconds:g} s.{why}"
                ) from None
            except OSError as error:
                raise NoRunningJobError(f"The job in {self.output_dir} has ended ({error.strerror}).") from None
        if answer is None:
            raise NoRunningJobError(f"The job in {self.output_dir} has ended without an answer.")
        if answer.get("ok") is True:
            result: dict[str, Any] = answer["result"]
            return result
        kind, text = answer.get("kind"), str(answer.get("error"))
        raise {messages.REFUSED: RefusedError, messages.ENDED: NoRunningJobError}.get(str(kind), ControlError)(text)

    def _open(self) -> socket.socket:
        """Connect to the job."""
        self._require_socket()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        seconds = _SECONDS_TO_CONNECT if self._timeout is None else min(self._timeout, _SECONDS_TO_CONNECT)
        connection.settimeout(seconds)
        try:
            with usable_path(self.output_dir) as path:
                _connect(connection, path, time.monotonic() + seconds)
        except OSError as error:
            connection.close()
            raise self._explained(error) from None
        if not (is_trusted(peer_user(connection)) or os.geteuid() == 0):
            connection.close()
            raise NoRunningJobError(_NOT_ALLOWED.format(self.output_dir))
        return connection

    def _require_socket(self) -> None:
        if not os.path.isdir(self.output_dir):
            raise NotADirectoryError(f"{self.output_dir} is not a directory. Pass the output directory of a run.")
        try:
            status = socket_status(self.output_dir)
        except FileExistsError as error:
            raise NoRunningJobError(f"{error}, so no job can be reached through it. Remove it.") from None
        except PermissionError:
            raise NoRunningJobError(_NOT_ALLOWED.format(self.output_dir)) from None
        if status is None:
            raise NoRunningJobError(f"No job runs in {self.output_dir}.")

    def _explained(self, error: OSError) -> Exception:
        if isinstance(error, PermissionError):
            return NoRunningJobError(_NOT_ALLOWED.format(self.output_dir))
        if isinstance(error, TimeoutError):
            return NoAnswerError(f"The job in {self.output_dir} does not accept connections.{_MAY_BE_STOPPED}")
        if isinstance(error, (ConnectionRefusedError, FileNotFoundError)):
            return NoRunningJobError(
                f"No job runs in {self.output_dir} on this host: {SOCKET_NAME} is left from a job that was killed, or "
                "belongs to a job on another host."
            )
        return error


def _connect(connection: socket.socket, path: str, deadline: float) -> None:
    """Connect, and raise TimeoutError if the job accepts no connection until then."""
    while True:
        try:
            connection.connect(path)
        except BlockingIOError:
            # The queue of the socket is full. Linux does not wait for room in it.
            if time.monotonic() >= deadline:
                raise TimeoutError from None
            time.sleep(_SECONDS_BETWEEN_TRIES)
        else:
            return


_MAY_BE_STOPPED = " Its process may be stopped (SIGSTOP): kill -CONT PID lets it continue."
_NOT_ALLOWED = "The job in {0} belongs to another user, so it cannot be controlled."


class _Lines:
    """Lines of an answer, with a note to the user when it takes long."""

    def __init__(self, connection: socket.socket, deadline: float | None, note: Callable[[str], None] | None) -> None:
        self._connection = connection
        self._deadline = deadline
        self._note = note
        self._noted_at: float | None = time.monotonic() + _SECONDS_BEFORE_NOTE if note is not None else None
        self._received = bytearray()
        self._about: dict[str, Any] = {}

    def answer(self) -> dict[str, Any] | None:
        """Return the final line; None if the job closed the connection."""
        while True:
            line = self._line()
            if line is None:
                return None
            content = json.loads(line)
            if not isinstance(content, dict):
                return None
            if "ok" in content:
                return content
            self._about = content

    def _line(self) -> bytes | None:
        while b"\n" not in self._received:
            part = self._part()
            if not part or len(self._received) > _MOST_ANSWER_BYTES:
                return None
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        return bytes(line)

    def _part(self) -> bytes:
        while True:
            now = time.monotonic()
            if self._noted_at is not None and now >= self._noted_at:
                self._tell()
            limits = [one - now for one in (self._deadline, self._noted_at) if one is not None]
            if self._deadline is not None and now >= self._deadline:
                raise TimeoutError
            self._connection.settimeout(max(min(limits), 0.001) if limits else None)
            try:
                return self._connection.recv(65536)
            except TimeoutError:
                continue

    def _tell(self) -> None:
        assert self._note is not None
        self._noted_at = None
        about = self._about
        where = f" (step {about['step']} is done, rank 0 is in {about['phase']})" if "phase" in about else ""
        self._note(f"waiting for the job{where} ...")


def _known(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a dataclass has: a newer job may send more."""
    return {one.name: values.get(one.name) for one in fields(cls)}
