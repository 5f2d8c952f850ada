"""Status of a job: progress, losses, speed and the phase of each rank, read without the training thread.

The control thread calls it. It never waits for the device or for other ranks, so it answers while a rank is stuck.
"""

import os
import socket
import time
from typing import TYPE_CHECKING, Any

from forgather._watch.board import COUNT, PHASE, PID, STEP, STOPPED, Board
from forgather._watch.limits import LABELS, SETUP
from forgather.ml.distributed.watch.sentry import current_board
from forgather.ml.trainer.callbacks.display import planned_steps
from forgather.ml.trainer.trainer_types import TrainerState

if TYPE_CHECKING:
    from forgather.ml.trainer.trainer import Trainer


class Pulse:
    """Times of the last new notes of each rank, and of the last step; `observe` is called about once a second."""

    def __init__(self, trainer: "Trainer[Any]") -> None:
        self._trainer = trainer
        self.started_at = time.monotonic()
        self._step = (0, self.started_at)
        self._notes: dict[int, tuple[int, float]] = {}

    def observe(self, now: float) -> None:
        step = _step(self._trainer)
        if step != self._step[0]:
            self._step = (step, now)
        watched = current_board()
        for rank, cells in enumerate(() if watched is None else watched[0].cells):
            if self._notes.get(rank, (-1, 0.0))[0] != cells[COUNT]:
                self._notes[rank] = (cells[COUNT], now)

    @property
    def seconds_since_step(self) -> float:
        return time.monotonic() - self._step[1]

    def seconds_since_note(self, rank: int) -> float:
        return time.monotonic() - self._notes.get(rank, (0, self.started_at))[1]


def _step(trainer: "Trainer[Any]") -> int:
    return 0 if trainer.state is None else int(trainer.state.global_step)


def job_status(trainer: "Trainer[Any]", pulse: Pulse) -> dict[str, Any]:
    """Return the status as plain values; see docs/tools.md for the keys."""
    pulse.observe(time.monotonic())
    ranks = _ranks(trainer, pulse)
    return {
        "output_dir": os.path.abspath(trainer.args.output_dir),
        "trainer": type(trainer).__name__,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "world_size": trainer.num_processes or 1,
        "uptime": time.monotonic() - pulse.started_at,
        "phase": ranks[0]["phase"],
        **_progress(trainer),
        "seconds_since_step": pulse.seconds_since_step,
        **_losses(trainer.state),
        **_checkpoints(trainer),
        "ranks": ranks,
    }


def _progress(trainer: "Trainer[Any]") -> dict[str, Any]:
    state = trainer.state
    step = _step(trainer)
    limit = None if state is None else planned_steps(state)
    reporter = getattr(trainer, "reporter", None)
    rate = reporter.speed.rate(reporter.speed.num_steps) if reporter is not None else 0.0
    return {
        "step": step,
        "max_steps": limit,
        "epoch": 0.0 if state is None else float(state.epoch),
        "num_epochs": float(trainer.args.num_train_epochs),
        "steps_per_second": rate or None,
        "seconds_left": (limit - step) / rate if limit is not None and rate > 0 else None,
    }


def _losses(state: TrainerState | None) -> dict[str, Any]:
    """Return the last logged losses; the loss of a step that is not logged yet stays on the device."""
    history = [] if state is None else list(state.log_history)
    train, evaluation = _last_with(history, "loss"), _last_with(history, "eval_loss")
    return {
        "loss": train.get("loss"),
        "loss_step": train.get("step"),
        "learning_rate": train.get("learning_rate"),
        "eval_loss": evaluation.get("eval_loss"),
        "eval_step": evaluation.get("step"),
    }


def _last_with(history: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next((record for record in reversed(history) if name in record), {})


def _checkpoints(trainer: "Trainer[Any]") -> dict[str, Any]:
    loop, saver = getattr(trainer, "loop", None), getattr(trainer, "saver", None)
    is_saving = saver is not None and saver.is_saving
    saved = loop.saved_path if loop is not None and not is_saving else ""
    path = saved or trainer.resume_path
    return {"checkpoint": None if path is None else os.path.abspath(path), "background_save": is_saving}


def _ranks(trainer: "Trainer[Any]", pulse: Pulse) -> list[dict[str, Any]]:
    watched = current_board()
    if watched is None:
        phase = "training" if trainer.state is not None else LABELS[SETUP]
        own = {"rank": 0, "host": socket.gethostname(), "pid": os.getpid(), "step": _step(trainer), "phase": phase}
        return [{**own, "seconds_without_progress": None, "stopped": False}]
    board = watched[0]
    return [_rank(board, rank, pulse) for rank in range(board.num_ranks)]


def _rank(board: Board, rank: int, pulse: Pulse) -> dict[str, Any]:
    cells = board.cells[rank]
    return {
        "rank": rank,
        "host": board.host(rank),
        "pid": int(cells[PID]),
        # The number of the step that the rank works on.
        "step": int(cells[STEP]),
        "phase": LABELS.get(cells[PHASE], "unknown"),
        "seconds_without_progress": pulse.seconds_since_note(rank),
        "stopped": bool(cells[STOPPED]),
    }
