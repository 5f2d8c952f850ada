"""Work that each rank does for itself and that counts only when all of them succeeded."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from forgather.ml.checkpoint.errors import CheckpointError
from forgather.ml.distributed import DistributedError, Peers

T = TypeVar("T")


@dataclass(frozen=True)
class _Outcome(Generic[T]):
    value: T | None
    report: DistributedError | None = None
    error_class: type[CheckpointError] | None = None
    is_misfit: bool = False


def on_every_rank(peers: Peers, work: Callable[[], T], during: str, failure: type[CheckpointError]) -> list[T]:
    """Run `work` here, and return the results of all ranks; `work` must contain no collectives.

    When it fails anywhere, every rank raises the same error about the first failing rank: `failure`, or the failing
    rank's own class when that is a checkpoint error already (a damaged file is one on every rank).
    """
    own_error: BaseException | None = None
    outcome: _Outcome[T]
    try:
        outcome = _Outcome(work())
    except BaseException as error:  # noqa: BLE001 - raised again below, on every rank
        own_error = error
        known = type(error) if isinstance(error, CheckpointError) else None
        report = DistributedError.describing(error, during, peers.rank)
        outcome = _Outcome(None, report, known, getattr(error, "is_misfit", False))
    try:
        outcomes = peers.gather(outcome, during)
    except DistributedError as lost:
        lost_error = failure(str(lost))
        lost_error.contact_lost = True
        raise lost_error from (own_error or lost)
    if own_error is not None and not isinstance(own_error, Exception):
        # An interrupt keeps its meaning; the others have been told.
        raise own_error
    if own_error is not None and peers.size == 1:
        if isinstance(own_error, CheckpointError):
            raise own_error
        raise failure(f"{during} failed: {type(own_error).__name__}: {own_error}") from own_error
    for result in outcomes:
        if result.report is not None:
            shared_error = (result.error_class or failure)(str(result.report))
            shared_error.is_misfit = result.is_misfit
            raise shared_error from own_error
    return [result.value for result in outcomes]  # type: ignore[misc]
