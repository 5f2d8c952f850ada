"""Desk: receives requests of `forgather control` on rank 0, and serves them on all ranks after the same step.

The number of requests travels in the batch metadata that ranks exchange anyway. When it grows, all ranks take the new
requests from rank 0 in one broadcast. Status and stacks are answered by the control thread, also if a rank is stuck.
"""

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forgather._control import messages
from forgather._control.messages import BadRequest, Request
from forgather._control.server import Server
from forgather.ml.checkpoint.errors import CheckpointSaveError
from forgather.ml.distributed import DistributedError
from forgather.ml.distributed.watch.stacks_on_request import collect_stacks
from forgather.ml.trainer.control.settings import apply_settings, checked_settings
from forgather.ml.trainer.control.status import Pulse, job_status
from forgather.ml.trainer.loop.evaluation_sums import EvaluationInterrupted
from forgather.ml.trainer.loop.nonfinite import NonFiniteError
from forgather.ml.trainer.loop.signals import CONTROL_ABORT, CONTROL_STOP, Aborted, Preempted, StopSignals

if TYPE_CHECKING:
    from forgather.ml.trainer.trainer import Trainer

logger = logging.getLogger(__name__)

_NAMES_OF_STOPS = {messages.STOP: CONTROL_STOP, messages.ABORT: CONTROL_ABORT}


class _Asked(NamedTuple):
    request: Request
    client: int


class RequestFailed(Exception):
    """Request that failed on all ranks, while training can continue."""


class Desk:
    """Requests to one run of a trainer. Only rank 0 has a socket."""

    def __init__(self, trainer: "Trainer[Any]", signals: StopSignals) -> None:
        self._trainer = trainer
        self._signals = signals
        self._server: Server | None = None
        self._pulse = Pulse(trainer)
        self._waiting: deque[_Asked] = deque()
        self._leaving: list[_Asked] = []
        """Clients that wait for the end of the run."""
        self._saving: list[int] = []
        """Clients that wait for the background save in flight."""
        self._num_asked = 0
        self.num_served = 0
        """Number of requests that all ranks have served."""

    def open(self) -> None:
        """Create the socket on rank 0, once; the output directory is locked. Without a socket, training continues."""
        directory = self._trainer.args.output_dir
        if self._trainer.team.rank != 0 or self._server is not None:
            return
        try:
            self._server = Server(directory, self._take, self._pulse.observe)
        except OSError as error:
            logger.warning(
                "forgather control cannot reach this job, because no socket can be created in %s: %s",
                *(directory, error.strerror or error),
            )

    def close(self, error: BaseException | None) -> None:
        """Answer the clients that wait, and remove the socket; `error` has ended the run, or None."""
        if self._server is None:
            return
        for asked in self._leaving:
            self._server.send(asked.client, self._farewell(asked.request, error))
        unserved = [*(one.client for one in self._waiting), *self._saving]
        for client in unserved:
            self._server.send(client, messages.failure(messages.ENDED, self._how_it_ended(error)))
        self._server.close()

    def count(self) -> int:
        """Return the number of requests that this rank has received for all ranks."""
        return self._num_asked

    # --- control thread

    def _take(self, request: Request, client: int) -> None:
        """Answer a request, or queue it for all ranks."""
        if request.command == messages.STATUS:
            self._reply(client, messages.success(job_status(self._trainer, self._pulse)))
        elif request.command == messages.STACKS:
            # Some seconds of waiting, during which other clients must be served.
            threading.Thread(target=self._send_stacks, args=(client,), name="control-stacks", daemon=True).start()
        elif request.command in _NAMES_OF_STOPS:
            self._signals.ask(_NAMES_OF_STOPS[request.command])
            self._leaving.append(_Asked(request, client))
            self._confirm(request, client)
        else:
            self._queue(self._checked(request), client)

    def _checked(self, request: Request) -> Request:
        if request.command == messages.EVALUATE and self._trainer.eval_dataset is None:
            raise BadRequest("The run has no eval_dataset, so it cannot evaluate.")
        if request.command != messages.SET:
            return request
        return Request(request.command, request.wait, checked_settings(self._trainer, request.values))

    def _queue(self, request: Request, client: int) -> None:
        self._confirm(request, client)
        self._waiting.append(_Asked(request, client))
        # Last: the training thread takes as many requests as this number says.
        self._num_asked += 1

    def _confirm(self, request: Request, client: int) -> None:
        """Tell the client that its request is queued, and what the job does now."""
        status = job_status(self._trainer, self._pulse)
        about = {name: status[name] for name in ("step", "phase", "seconds_since_step")}
        if request.wait:
            self._reply(client, messages.accepted(about), is_last=False)
        else:
            self._reply(client, messages.success({"queued": True, **about}))

    def _send_stacks(self, client: int) -> None:
        try:
            line = messages.success({"stacks": collect_stacks()})
        except (OSError, RuntimeError) as error:
            line = messages.failure(messages.FAILED, f"The stacks cannot be collected: {error}")
        self._reply(client, line)

    def _reply(self, client: int, line: bytes, is_last: bool = True) -> None:
        if self._server is not None:
            self._server.send(client, line, is_last)

    # --- training thread

    def serve(self, num_asked: int) -> None:
        """Carry out the requests up to `num_asked`, which is equal on all ranks; collective."""
        number, self.num_served = num_asked - self.num_served, num_asked
        is_here = self._server is not None
        own = [self._waiting.popleft() for _ in range(number)] if is_here else []
        requests: list[Request] = self._trainer.team.broadcast([one.request for one in own])
        for place, request in enumerate(requests):
            client = own[place].client if is_here else -1
            try:
                self._carry_out(request, client)
            except RequestFailed as failed:
                logger.warning("forgather control: %s failed: %s", request.command, failed)
                self._reply(client, messages.failure(messages.FAILED, str(failed)))
            except EvaluationInterrupted:
                # The caller heeds the stop request that has interrupted the evaluation.
                self._reply(client, messages.failure(messages.ENDED, "The evaluation was interrupted: the run stops."))

    def _carry_out(self, request: Request, client: int) -> None:
        step = self._trainer.state.global_step
        if request.command == messages.SAVE:
            self._save(client)
        elif request.command == messages.EVALUATE:
            self._reply(client, messages.success({"step": step, "metrics": self._evaluate()}))
        elif request.command == messages.SET:
            changed = apply_settings(self._trainer, request.values)
            self._reply(client, messages.success({"step": step, "changed": changed}))

    def _save(self, client: int) -> None:
        trainer, control = self._trainer, self._trainer.control
        # A request of a callback for the next step stays.
        is_wanted = control.should_save
        try:
            with self._kept_buffers(trainer.args.async_save):
                path = trainer.saver.save_in_training(is_scheduled=False, waits=False)
        except CheckpointSaveError as error:
            if error.contact_lost:
                raise
            raise RequestFailed(str(error)) from error
        finally:
            control.should_save = control.should_save or is_wanted
        if trainer.saver.is_saving:
            self._saving.append(client)
        elif path:
            self._reply(client, _saved(trainer.state.global_step, path))
        else:
            raise RequestFailed("the checkpoint could not be saved; the log of the job has the reason")

    def note_saved(self, path: str) -> None:
        """Answer the clients that wait for a background save; "" if it failed."""
        for client in self._saving:
            failed = messages.failure(messages.FAILED, "The save failed; the log of the job has the reason.")
            self._reply(client, _saved(self._trainer.loop.saved_step, path) if path else failed)
        self._saving = []

    def _evaluate(self) -> dict[str, Any]:
        try:
            with self._kept_buffers(False):
                return self._trainer.evaluator.evaluate_aside()
        except (EvaluationInterrupted, NonFiniteError):
            raise
        except DistributedError as error:
            # All ranks have agreed on the error of one rank, so all of them can continue.
            if error.rank is None:
                raise
            raise RequestFailed(f"{error.error_type}: {error.message}") from error
        except Exception as error:
            # Ranks that have not agreed on an error cannot continue: some of them may wait for others.
            if self._trainer.team.size > 1:
                raise
            raise RequestFailed(f"{type(error).__name__}: {error}") from error

    @contextlib.contextmanager
    def _kept_buffers(self, is_left_out: bool) -> Iterator[None]:
        """Restore the buffers of this replica after the body, which synchronises them with other replicas."""
        if is_left_out or self._trainer.team.size == 1:
            yield
            return
        buffers = list(self._trainer._forward_modules().buffers())
        before = [buffer.clone() for buffer in buffers]
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, kept in zip(buffers, before, strict=True):
                    buffer.copy_(kept)

    # --- the end

    def _farewell(self, request: Request, error: BaseException | None) -> bytes:
        is_expected = isinstance(error, Preempted if request.command == messages.STOP else Aborted)
        if isinstance(error, (Preempted, Aborted)) and is_expected:
            return _saved(error.step, error.checkpoint_path)
        return messages.failure(messages.ENDED, self._how_it_ended(error))

    def _how_it_ended(self, error: BaseException | None) -> str:
        step = 0 if self._trainer.state is None else self._trainer.state.global_step
        if error is None:
            return f"The run has finished at step {step}."
        if isinstance(error, (Preempted, Aborted)):
            return f"The run has ended: {error}."
        first_line = next(iter(str(error).splitlines()), "")
        return f"The run has failed at step {step}: {type(error).__name__}: {first_line}"


def _saved(step: int, path: str) -> bytes:
    """Return the answer with a checkpoint; "" if there is none. The client may have another current directory."""
    return messages.success({"step": step, "checkpoint": os.path.abspath(path) if path else None})
