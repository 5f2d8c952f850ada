"""Restart policy: a failure that repeats at the same step goes back one checkpoint, and the third time ends the job.

It applies to `resume_from_checkpoint=True` with a checkpoint to resume from. Progress beyond
the step of the failure resets the count. `Trainer._resolve_checkpoint` calls it on every rank, with the same result.
"""

import logging
import os
from collections.abc import Sequence
from typing import NamedTuple

from forgather.ml.checkpoint.manager import CheckpointManager
from forgather.ml.checkpoint.store import step_of
from forgather.ml.trainer.elastic.failure_notes import FILE_NAME, Failure, read_failures
from forgather.ml.trainer.ranks.team import Team

logger = logging.getLogger(__name__)

_GOES_BACK_AFTER = 2
_STOPS_AFTER = 3


class RepeatedFailureError(RuntimeError):
    """The same failure has ended several attempts at the same step. Launchers do not restart after it."""

    exit_code = 3


class Verdict(NamedTuple):
    """Last failure without progress since, and the number of attempts in a row that it has ended."""

    failure: Failure
    num_attempts: int


def judge(failures: Sequence[Failure], newest_step: int) -> Verdict | None:
    """Return the verdict for a run with its newest checkpoint at `newest_step`; None if nothing is against it."""
    if not failures or newest_step > failures[-1].step:
        return None
    last = failures[-1]
    attempts: dict[str, set[tuple[str, int]]] = {}
    for one in failures:
        attempts.setdefault(one.attempt, set()).add(one.key)
    number = 0
    for keys in reversed(attempts.values()):
        if last.key not in keys:
            break
        number += 1
    return Verdict(last, number)


def checkpoint_after_failures(team: Team, manager: CheckpointManager, output_dir: str, newest: str) -> str:
    """Return the checkpoint to resume from; raise `RepeatedFailureError` after three equal failures; collective."""
    verdict = judge(_failures_of_all_ranks(team, output_dir), step_of(newest) or 0)
    if verdict is None:
        return newest
    path = os.path.join(output_dir, FILE_NAME)
    if verdict.num_attempts >= _STOPS_AFTER:
        raise RepeatedFailureError(_diagnosis(verdict, path, newest))
    if verdict.num_attempts < _GOES_BACK_AFTER:
        _tell(team, f"The last attempt failed: {verdict.failure}. It is noted in {path}. Resuming from {newest}.")
        return newest
    return _older(team, manager, verdict, newest)


def _failures_of_all_ranks(team: Team, output_dir: str) -> list[Failure]:
    """Return the failures that any rank can read, oldest first: nodes may have separate disks. Collective."""
    # The newest attempts decide, and a thousand notes of each rank would be slow to gather.
    found = team.gather(read_failures(output_dir)[-4 * _STOPS_AFTER :])
    unique = {(one.attempt, one.rank, *one.key): one for failures in found for one in failures}
    return sorted(unique.values(), key=lambda one: one.time)


def _older(team: Team, manager: CheckpointManager, verdict: Verdict, newest: str) -> str:
    candidates = manager.complete_checkpoints()
    times = f"The same failure has ended {verdict.num_attempts} attempts: {verdict.failure}."
    if len(candidates) < 2:
        _tell(team, f"{times} There is no older checkpoint to go back to, so {newest} is used again.")
        return newest
    _tell(
        team,
        f"{times} Going back one checkpoint, from {newest} to {candidates[-2]}. If it fails there again, the job ends.",
    )
    return candidates[-2]


def _diagnosis(verdict: Verdict, path: str, newest: str) -> str:
    failure = verdict.failure
    return (
        f"The same failure has ended {verdict.num_attempts} attempts at step {failure.step}, also after going back one "
        f"checkpoint, so another restart would fail too: {failure}. The cause is probably the data or the code of this step, "
        f"or rank {failure.rank} on host {failure.host}. Correct it, then remove {path} to resume from {newest}, or set "
        "resume_from_checkpoint to a checkpoint."
    )


def _tell(team: Team, message: str) -> None:
    if team.rank == 0:
        logger.warning("%s", message)
