"""Attempt: identity, step and resumed checkpoint of one start of a job, for failures.jsonl.

Under Forgather's launcher, the step is also kept in a small mapped file: the launcher reads it after a worker has died
without a Python error. The trainer creates one per `train`, and notes a failure only after the first step began.
"""

import json
import mmap
import os
import uuid
from typing import Any

from forgather.ml.distributed.agreement import DistributedError
from forgather.ml.distributed.entry_point import lost_contact
from forgather.ml.trainer.elastic.failure_notes import failure_of, note_failure
from forgather.ml.trainer.ranks.team import Team

NOTES_VARIABLE = "FORGATHER_RUN_NOTES"
"""Folder of notes for the launcher; set in the environment of its workers."""
_STEP_DIGITS = 20


class Attempt:
    """Attempt to train; `begin` starts the notes, and `step` is the number of completed steps."""

    def __init__(self, team: Team, output_dir: str, resumed_from: str | None) -> None:
        """Agree on the identity of the attempt; collective."""
        self._team = team
        self._output_dir = output_dir
        self._facts: dict[str, Any] = {"attempt": team.broadcast(uuid.uuid4().hex), "resumed_from": resumed_from}
        self._has_begun = False
        self._step = 0
        self._mapped: mmap.mmap | None = None
        self._place = 0

    def begin(self, step: int) -> None:
        """Record that training begins at `step`."""
        self._has_begun = True
        folder = os.environ.get(NOTES_VARIABLE)
        if folder is not None and os.path.isdir(folder):
            self._map(os.path.join(folder, f"progress-{os.environ.get('LOCAL_RANK', '0')}.json"))
        self.step = step

    @property
    def facts(self) -> dict[str, Any]:
        """Identity of the attempt, and the checkpoint that it resumed from."""
        return dict(self._facts)

    @property
    def step(self) -> int:
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        if self._mapped is not None:
            # Only the digits change, so that a kill cannot leave a torn file.
            self._mapped[self._place : self._place + _STEP_DIGITS] = f"{step:{_STEP_DIGITS}d}".encode()

    def note(self, error: Exception) -> None:
        """Note the failure of this attempt, unless it is only the consequence of a failure elsewhere."""
        if not self._has_begun or lost_contact(error):
            return
        rank, kind, message = self._team.rank, type(error).__name__, str(error)
        if isinstance(error, DistributedError) and error.rank is not None:
            # All ranks raise the same error.
            if self._team.rank != 0:
                return
            rank, kind, message = error.rank, error.error_type, error.message
        note_failure(self._output_dir, failure_of({**self._facts, "step": self._step}, rank, kind, message))

    def _map(self, path: str) -> None:
        facts = {**self._facts, "output_dir": os.path.abspath(self._output_dir), "rank": self._team.rank}
        start = json.dumps(facts)[:-1].encode() + b', "step": '
        self._place = len(start)
        with open(path, "wb+") as file:
            file.write(start + b"0".rjust(_STEP_DIGITS) + b"}")
            file.flush()
            self._mapped = mmap.mmap(file.fileno(), 0)
