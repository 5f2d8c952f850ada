"""Error agreement between ranks: local work that counts only if it succeeds on all ranks.

After `on_every_rank`, either every rank continues or every rank raises the same checkpoint error, so no rank waits in a
collective that another rank never reaches. The save and load paths run each of their steps through it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from forgather.ml.checkpoint import errors
from forgather.ml.checkpoint.errors import CheckpointError
from forgather.ml.distributed import DistributedError, Peers

T = TypeVar("T")


@dataclass(frozen=True)
class _Outcome(Generic[T]):
    value: T | None
    report: DistributedError | None = None
    error_class: str = ""
    is_misfit: bool = False


def on_every_rank(peers: Peers, work: Callable[[], T], during: str, failure: type[CheckpointError]) -> list[T]:
    """Run `work` on this rank and return the results of all ranks, by rank. Collective.

    `work` must contain no collectives: a rank that fails would skip them while the others wait. If `work` fails on any
    rank, every rank raises the same error about the first failing rank. Its class is `failure`, or the original class
    if that is a `CheckpointError`, so that a damaged file raises `CheckpointCorruptError` on every rank.
    """
    own_error: BaseException | None = None
    outcome: _Outcome[T]
    try:
        outcome = _Outcome(work())
    except BaseException as error:  # noqa: BLE001 - Raised again below, on every rank.
        # Even an interrupt must reach the gather below, or the other ranks hang in it until they time out.
        own_error = error
        # Send the name of the class and a text report: an arbitrary exception cannot be sent.
        known = type(error).__name__ if isinstance(error, CheckpointError) else ""
        report = DistributedError.describing(error, during, peers.rank)
        outcome = _Outcome(None, report, known, getattr(error, "is_misfit", False))
    try:
        outcomes = peers.gather(outcome, during)
    except DistributedError as lost:
        # The state of the other ranks is unknown. The flag keeps this rank from deleting files that they still write.
        lost_error = failure(str(lost))
        lost_error.contact_lost = True
        raise lost_error from (own_error or lost)
    if own_error is not None and not isinstance(own_error, Exception):
        # Keep the type of KeyboardInterrupt and SystemExit. The other ranks raise `failure` from the gathered report.
        raise own_error
    if own_error is not None and peers.size == 1:
        # A report that names rank 0 would only add noise in a single-process job.
        if isinstance(own_error, CheckpointError):
            raise own_error
        raise failure(f"{during} failed: {type(own_error).__name__}: {own_error}") from own_error
    # Outcomes are in rank order, so every rank picks the same failure.
    for result in outcomes:
        if result.report is not None:
            shared_error = _known_class(result.error_class, failure)(str(result.report))
            shared_error.is_misfit = result.is_misfit
            raise shared_error from own_error
    return [result.value for result in outcomes]  # type: ignore[misc]


def _known_class(name: str, failure: type[CheckpointError]) -> type[CheckpointError]:
    """Return the error class of this name, or `failure` if the checkpoint system has none."""
    found = vars(errors).get(name)
    return found if isinstance(found, type) and issubclass(found, CheckpointError) else failure
