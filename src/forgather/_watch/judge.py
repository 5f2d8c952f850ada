"""Judge: decides from the notes of all ranks whether one of them hangs, and which.

A rank that waits in a collective is a victim. The culprit is a rank that has ended, cannot be reached, is stopped, or
computes past its limit while no other computing rank is behind it. Each rank's watcher has a judge.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from forgather._watch import limits
from forgather._watch.board import (
    ACTIVITY,
    BEAT,
    COUNT,
    DEAD,
    GONE,
    LIMIT,
    LOCAL,
    PHASE,
    PID,
    PUBLISHED,
    START,
    STEP,
    STOPPED,
    Board,
)
from forgather._watch.processes import is_running, is_stopped, is_traced

RUNNING, IN_COLLECTIVE, IN_BACKWARD, IN_DEBUGGER, IN_COMPILER = range(5)
"""Activities of a rank's main thread, from its stack."""

ABSENT, GONE_STATE, DEAD_STATE, OUTSIDE, UNREACHABLE, STOPPED_STATE, WAITING, ACTIVE, DEBUGGED = range(9)
"""Conditions of a rank."""

GRACE_SECONDS = 8.0
"""Time that the usual errors have to end the other ranks when one has ended."""
_DOUBTFUL_SECONDS = 3.0
_SILENT_SECONDS = 6.0
_RANKS_PER_SECOND = 200
_STALE_BEAT_MS = 5000
_PAUSE_SECONDS = 5.0
_PHASES_OF_STEP = (limits.LOADING, limits.FORWARD_BACKWARD, limits.REDUCE, limits.OPTIMIZER, limits.AFTER_STEP)
_ORDER_IN_STEP = {phase: number for number, phase in enumerate(_PHASES_OF_STEP)}


def period(num_ranks: int) -> float:
    """Return the seconds between two notes in the store: with thousands of ranks, one a second would load it."""
    return max(1.0, num_ranks / _RANKS_PER_SECOND)


@dataclass
class View:
    """A rank as this judge sees it."""

    rank: int
    count: int = -1
    changed_at: float = 0.0
    """Time of the last new note."""
    published: int = -1
    published_at: float = 0.0
    """Time of the last notes from another node."""
    ended_at: float | None = None
    condition: int = ABSENT
    step: int = 0
    phase: int = limits.OUTSIDE
    limit: float = 0.0
    activity: int = RUNNING

    @property
    def is_inside(self) -> bool:
        return self.condition in (STOPPED_STATE, WAITING, ACTIVE)

    @property
    def has_ended(self) -> bool:
        return self.condition in (DEAD_STATE, GONE_STATE)

    def is_behind(self, other: "View") -> bool:
        """Return whether this rank has not reached the place where `other` is."""
        if self.step != other.step:
            return self.step < other.step
        own, its = _ORDER_IN_STEP.get(self.phase), _ORDER_IN_STEP.get(other.phase)
        return own is not None and its is not None and own < its


@dataclass(frozen=True)
class Finding:
    """A hang: the culprits, and the views of all ranks at that time."""

    culprits: list[View]
    others: list[View] = field(default_factory=list)


class Judge:
    """Views of all ranks, updated by `look`, from the position of one rank."""

    def __init__(self, board: Board, rank: int, clock: Callable[[], float], limit_of: Callable[[int], float]) -> None:
        """`limit_of` returns the limit of a phase, for ranks that have not told theirs."""
        self._board = board
        self._rank = rank
        self._clock = clock
        self._limit_of = limit_of
        self.views = [View(number) for number in range(board.num_ranks)]
        self._looked_at: float | None = None
        self._period = period(board.num_ranks)

    def look(self) -> Finding | None:
        """Read the board; return a finding if the job hangs."""
        now = self._clock()
        self._skip_pause(now)
        for view in self.views:
            self._update(view, now)
        if not self.views[self._rank].is_inside:
            return None
        inside = [view for view in self.views if view.is_inside]
        if self._is_paused(inside):
            for view in self.views:
                view.changed_at = now
            return None
        culprits = self._ended(inside, now) or self._late(inside, now)
        others = [view for view in self.views if view not in culprits and view.condition != ABSENT]
        return Finding(culprits, others) if culprits else None

    def _skip_pause(self, now: float) -> None:
        """Shift all times after a pause of this process, such as Ctrl-Z of the whole job."""
        before, self._looked_at = self._looked_at, now
        if before is not None and now - before > _PAUSE_SECONDS:
            for view in self.views:
                view.changed_at += now - before
                view.published_at += now - before

    def _is_paused(self, inside: list[View]) -> bool:
        """Return whether somebody looks at a rank in a debugger, or has stopped the whole job."""
        if any(view.condition == DEBUGGED for view in self.views):
            return True
        others = [view for view in self.views if view.condition in (UNREACHABLE, OUTSIDE, DEAD_STATE)]
        return not others and all(view.condition == STOPPED_STATE for view in inside)

    # --- the condition of a rank

    def _update(self, view: View, now: float) -> None:
        cells = self._board.cells[view.rank]
        if cells[COUNT] != view.count:
            view.count, view.changed_at = cells[COUNT], now
        if cells[PUBLISHED] != view.published:
            view.published, view.published_at = cells[PUBLISHED], now
        view.step, view.phase, view.activity = cells[STEP], cells[PHASE], cells[ACTIVITY]
        view.limit = cells[LIMIT] / 1000.0 or self._limit_of(cells[PHASE])
        view.condition = self._condition(view, cells, now)
        if not view.has_ended:
            view.ended_at = None
        elif view.ended_at is None:
            view.ended_at = now

    def _condition(self, view: View, cells: memoryview, now: float) -> int:
        if not cells[PID]:
            return ABSENT
        if cells[GONE]:
            return GONE_STATE
        if cells[LOCAL]:
            if not is_running(cells[PID], cells[START]):
                cells[DEAD] = 1
                return DEAD_STATE
            cells[STOPPED] = int(is_stopped(cells[PID], cells[START]))
            if is_traced(cells[PID], cells[START]):
                # Held by gdb, the rank cannot note it for the other nodes.
                cells[ACTIVITY] = IN_DEBUGGER
                return OUTSIDE if cells[PHASE] == limits.OUTSIDE else DEBUGGED
        elif cells[DEAD]:
            return DEAD_STATE
        elif now - view.published_at > _SILENT_SECONDS * self._period:
            return UNREACHABLE
        return self._condition_of_running(cells, now)

    def _condition_of_running(self, cells: memoryview, now: float) -> int:
        if cells[PHASE] == limits.OUTSIDE:
            return OUTSIDE
        if cells[STOPPED]:
            return STOPPED_STATE
        # A thread that cannot beat has no chance to take the GIL, so its last word about the stack is out of date.
        if cells[LOCAL] and now * 1000 - cells[BEAT] > _STALE_BEAT_MS:
            return ACTIVE
        if cells[ACTIVITY] == IN_DEBUGGER:
            return DEBUGGED
        return WAITING if cells[ACTIVITY] in (IN_COLLECTIVE, IN_BACKWARD) and self._board.num_ranks > 1 else ACTIVE

    # --- culprits

    def _ended(self, inside: list[View], now: float) -> list[View]:
        """Return ranks that have ended, if all others have waited for longer than the grace period since."""
        ended = [view for view in self.views if view.has_ended]
        waits = all(view.condition == WAITING and now - view.changed_at > GRACE_SECONDS for view in inside)
        is_old = any(view.ended_at is not None and now - view.ended_at > GRACE_SECONDS for view in ended)
        return ended if waits and is_old else []

    def _late(self, inside: list[View], now: float) -> list[View]:
        """Return the culprits if a rank has passed its limit and nothing excuses it."""
        busy = [view for view in inside if view.condition != WAITING]
        # A rank may wait outside of a collective, such as for its device. A busy rank behind it excuses it.
        front = [view for view in busy if not any(other.is_behind(view) for other in busy)]
        late = [view for view in front if now - view.changed_at > view.limit]
        if any(self._is_doubtful(view, now) for view in inside):
            # Its last note says nothing about the present. It answers soon, or counts as unreachable.
            return []
        if not late and (busy or not any(now - view.changed_at > view.limit for view in inside)):
            return []
        stopped = [view for view in late if view.condition == STOPPED_STATE]
        for culprits in (self._in(DEAD_STATE, GONE_STATE), self._in(UNREACHABLE), stopped, late):
            if culprits:
                return culprits
        return self._in(OUTSIDE) or self._in(ABSENT) or inside

    def _is_doubtful(self, view: View, now: float) -> bool:
        is_elsewhere = not self._board.cells[view.rank][LOCAL]
        return is_elsewhere and now - view.published_at > _DOUBTFUL_SECONDS * self._period

    def _in(self, *conditions: int) -> list[View]:
        return [view for view in self.views if view.condition in conditions]
