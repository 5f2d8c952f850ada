"""Message of the watch: names the culprits and says where the other ranks wait.

Every reachable rank logs the same text, and the launcher prints it as the cause of the failure.
"""

from collections.abc import Sequence

from forgather._watch import judge, limits
from forgather._watch.board import PID, Board
from forgather._watch.judge import Finding, View

_MOST_NAMED = 8


def describe(board: Board, finding: Finding, now: float, name_of_limit: str, stopped_workers: Sequence[int]) -> str:
    """Return one sentence about the culprits and the other ranks, then the limit."""
    several = len(finding.culprits) > 1 and all(
        view.condition in (judge.WAITING, judge.ABSENT) for view in finding.culprits
    )
    parts = [_together(finding.culprits, now)] if several else [_culprit(board, one, now) for one in finding.culprits]
    if stopped_workers:
        processes = "process" if len(stopped_workers) == 1 else "processes"
        are = "is" if len(stopped_workers) == 1 else "are"
        parts[0] += f", and its worker {processes} {', '.join(map(str, stopped_workers))} {are} stopped"
    text = "; ".join([*parts, *_others(finding.others)]) + "."
    return text if not name_of_limit else f"{text} The limit is {name_of_limit}."


def _culprit(board: Board, view: View, now: float) -> str:
    who = f"rank {view.rank} (host {board.host(view.rank)}, pid {board.cells[view.rank][PID]})"
    seconds, where = f"{now - view.changed_at:.0f} s", place(view)
    if view.condition == judge.DEAD_STATE:
        return f"{who} died in {where} without an error message"
    if view.condition == judge.GONE_STATE:
        return f"{who} has exited; its own output shows the cause"
    if view.condition == judge.UNREACHABLE:
        return f"{who} has been unreachable for {now - view.published_at:.0f} s, and was last seen in {where}"
    if view.condition == judge.STOPPED_STATE:
        return f"{who} is stopped (SIGSTOP) and has been in {where} for {seconds}"
    if view.condition == judge.ABSENT:
        return f"rank {view.rank} has sent no note: it has not started, or cannot be reached"
    return f"{who} has been in {where} for {seconds}"


def _together(views: Sequence[View], now: float) -> str:
    who = names([view.rank for view in views])
    if views[0].condition == judge.ABSENT:
        return f"{who} have sent no note: they have not started, or cannot be reached"
    seconds = min(now - view.changed_at for view in views)
    places = " and ".join(sorted({place(view) for view in views}))
    return f"all ranks ({who}) have waited for each other in {places} for {seconds:.0f} s"


def _others(views: Sequence[View]) -> list[str]:
    groups: dict[tuple[int, str], list[int]] = {}
    for view in views:
        if view.is_inside:
            groups.setdefault((view.condition, place(view)), []).append(view.rank)
    return [_group(condition, where, ranks) for (condition, where), ranks in groups.items()]


def _group(condition: int, where: str, ranks: list[int]) -> str:
    one = len(ranks) == 1
    if condition == judge.WAITING:
        return f"{names(ranks)} {'waits' if one else 'wait'} in {where}"
    return f"{names(ranks)} {'is' if one else 'are'} in {where}"


def place(view: View) -> str:
    """Return the phase of a rank in words; a wait inside the backward pass is a wait for the gradient reduction."""
    waits_for_gradients = view.condition == judge.WAITING and view.activity == judge.IN_BACKWARD
    phase = limits.REDUCE if waits_for_gradients and view.phase == limits.FORWARD_BACKWARD else view.phase
    return limits.LABELS.get(phase, "an unknown phase")


def names(ranks: Sequence[int]) -> str:
    """Return "rank 3", "ranks 0, 1, 2" or, for many ranks, "ranks 0-6, 8"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) <= _MOST_NAMED:
        return f"ranks {', '.join(map(str, ranks))}"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return "ranks " + ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
