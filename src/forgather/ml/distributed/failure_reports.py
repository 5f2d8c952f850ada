"""Failure reports: a rank that fails tells the others why, so that all of them raise the same error.

The other ranks wait in collectives that nobody can call off, and learn only that contact is lost. So the rank that fails
leaves a report on the note board of the watch before its connections close, and the others look for it when they lose
contact. Steps without a failure pay nothing. Between nodes, the threads of the watch carry the report through the store.
Trainers surround a run with `raised_on_all_ranks`.
"""

import contextlib
import json
import time
import uuid
from collections.abc import Iterator

from forgather._job_secret import SealedStore
from forgather._watch.board import FAILURE_BYTES, PHASE, STEP, Board
from forgather._watch.judge import Finding, Judge, period
from forgather._watch.limits import LABELS, OUTSIDE
from forgather._watch.message import describe
from forgather.ml.distributed.agreement import DistributedError
from forgather.ml.distributed.entry_point import lost_contact
from forgather.ml.distributed.watch.sentry import registration

_KEY = "failure"
_PERIODS_TO_TELL = 2.5
"""Time for notes in the store to reach the other nodes."""
_SECONDS_TO_EXIT = 1.0
"""Time in which a process that closes its connections has exited."""
_POLL_SECONDS = 0.05
_MOST_CAUSES = 20
_DURING = "_forgather_during"

_depth = 0
_old: set[str] = set()
"""Identities of reports of earlier runs of the same processes, which may have caught the error."""


@contextlib.contextmanager
def raised_on_all_ranks(*orderly: type[BaseException]) -> Iterator[None]:
    """Leave a report if the body fails; if it only loses contact, raise the report of the rank that failed.

    An error of `orderly` ends all ranks by agreement, and is no failure. The outermost context of a process counts,
    because a callback may catch the error of an inner one.
    """
    global _depth
    _depth += 1
    try:
        yield
    except orderly:
        raise
    except BaseException as error:
        told = _told_elsewhere(error) if _depth == 1 else None
        if told is None:
            raise
        raise told from error
    finally:
        _depth -= 1
        if _depth == 0:
            _forget()


def described(error: BaseException, during: str, rank: int | None) -> BaseException:
    """Return an error of user code that `during` names, as an error of this rank if the job has several (`rank`).

    SystemExit and KeyboardInterrupt keep their meaning, and only remember `during` for the report.
    """
    vars(error).setdefault(_DURING, during)
    is_own = isinstance(error, Exception) and not isinstance(error, DistributedError) and not _has_lost_contact(error)
    return DistributedError.describing(error, during, rank) if is_own and rank is not None else error


def _told_elsewhere(error: BaseException) -> DistributedError | None:
    """Return the report of another rank if it explains this error; otherwise leave a report about this error."""
    place = registration()
    if place is None or place[0].num_ranks == 1:
        return None
    board, rank = place
    is_lost = _has_lost_contact(error)
    found = _find(board, is_lost) if is_lost or isinstance(error, DistributedError) else None
    if found is None and not is_lost:
        _leave(board, rank, error)
    if found is None and is_lost:
        _name_ended_ranks(board, rank, error)
    # An agreement may have raised the same error already.
    is_known = found is None or found.rank == rank or (isinstance(error, DistributedError) and error.rank == found.rank)
    return None if is_known else found


def _name_ended_ranks(board: Board, rank: int, error: BaseException) -> None:
    """Add the ranks that have ended without a report, such as by SIGKILL, to an error about lost contact."""
    judge, deadline = Judge(board, rank, time.monotonic, lambda _: 0.0), time.monotonic() + _SECONDS_TO_EXIT
    while True:
        judge.look()
        ended = [view for view in judge.views if view.has_ended]
        if ended or time.monotonic() >= deadline:
            break
        time.sleep(_POLL_SECONDS)
    if ended:
        error.add_note(describe(board, Finding(ended), time.monotonic(), "", []))


def _forget() -> None:
    """Remember that the present report, if any, belongs to a run that has ended here."""
    place = registration()
    found = None if place is None else _unpacked(place[0].failure, place[0].num_ranks)
    if found is not None:
        _old.add(found[0])


def _has_lost_contact(error: BaseException) -> bool:
    """Return whether an error, or a cause of it, says that contact between ranks was lost."""
    present: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        # An OSError comes from the user's code. Connections between ranks raise RuntimeErrors.
        if present is None or (lost_contact(present) and not isinstance(present, OSError)):
            return present is not None
        present = None if isinstance(present, DistributedError) else present.__cause__
    return False


def _find(board: Board, waits: bool) -> DistributedError | None:
    """Return the report of another rank; `waits` allows the store some time to carry it to this node."""
    is_spread = len(board.local_ranks) < board.num_ranks
    deadline = time.monotonic() + (_PERIODS_TO_TELL * period(board.num_ranks) if waits and is_spread else 0.0)
    while True:
        found = _unpacked(board.failure, board.num_ranks)
        if found is not None and found[0] not in _old:
            return found[1]
        if time.monotonic() >= deadline:
            return None
        time.sleep(_POLL_SECONDS)


def _leave(board: Board, rank: int, error: BaseException) -> None:
    """Leave a report, and keep the connections of this rank open until other nodes may have it."""
    report = report_of(error, _activity(board, rank), rank)
    board.set_failure(_packed(uuid.uuid4().hex, report), lambda present: _is_old(present, board.num_ranks))
    if report.rank == rank and len(board.local_ranks) < board.num_ranks:
        time.sleep(_PERIODS_TO_TELL * period(board.num_ranks))


def report_of(error: BaseException, during: str, rank: int) -> DistributedError:
    """Return the error that the other ranks raise; `during` is used for an error that does not know its activity."""
    during = vars(error).get(_DURING, during)
    if isinstance(error, DistributedError) and error.rank is None and error.__cause__ is not None:
        # Contact was lost after this rank had failed.
        error = error.__cause__
    return DistributedError.describing(error, during, rank)


def _activity(board: Board, rank: int) -> str:
    phase, step = board.cells[rank][PHASE], board.cells[rank][STEP]
    if phase == OUTSIDE or phase not in LABELS:
        return "running the trainer"
    return f"in {LABELS[phase]}" + (f" of step {step}" if step else "")


def share(store: SealedStore, board: Board, last: bytes) -> bytes:
    """Pass a report of this node on to the store, or one in the store to this node; return the last one that was."""
    own = board.failure
    if own and own != last:
        store.set(_KEY, own)
        return own
    received = store.find(_KEY)
    if received is None:
        return last
    if received != last and _unpacked(received, board.num_ranks) is not None and not _is_old(received, board.num_ranks):
        board.set_failure(received, lambda present: _is_old(present, board.num_ranks))
    return received


def _is_old(packed: bytes, num_ranks: int) -> bool:
    found = _unpacked(packed, num_ranks)
    return found is None or found[0] in _old


def _packed(identity: str, report: DistributedError) -> bytes:
    """Return a report as JSON that fits the board. The end of the traceback is kept, and the beginning of the message."""
    traceback, message = report.traceback_text, report.message
    while True:
        fields = [identity, report.rank, report.during[:500], report.error_type[:100], message, traceback]
        packed = json.dumps(fields, ensure_ascii=False).encode()
        if len(packed) <= FAILURE_BYTES:
            return packed
        if len(message) > len(traceback):
            message = message[: len(message) // 2]
        else:
            traceback = f"...{traceback[len(traceback) // 2 :]}" if len(traceback) > 100 else ""


def _unpacked(packed: bytes, num_ranks: int) -> tuple[str, DistributedError] | None:
    """Return identity and error of a report; None without one, and for bytes that are no report."""
    try:
        fields = json.loads(packed) if packed and len(packed) <= FAILURE_BYTES else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, list) or [type(one) for one in fields] != [str, int, str, str, str, str]:
        return None
    identity, rank, during, error_type, message, traceback = fields
    if not 0 <= rank < num_ranks:
        return None
    return identity, DistributedError(during, rank, error_type, message, traceback)
