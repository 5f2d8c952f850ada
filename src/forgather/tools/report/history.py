"""Attempts of a run, the steps that count, curves, events and goodput, computed from the lines of a run record."""

import itertools
import math
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from forgather.ml.trainer.callbacks.run_recorder import process_started
from forgather.ml.trainer.callbacks.support.record_file import Line
from forgather.ml.trainer.elastic.failure_notes import Failure
from forgather.tools.report import contents
from forgather.tools.report.contents import Attempt, Event, Goodput, Point
from forgather.tools.report.lines import number, text, time_of, whole_number

_NOT_DRAWN = ("step", "time", "kind", "busy", "memory", "epoch", "total_flos", "tokens")
_SILENCE_SECONDS = 900
"""A run on another machine counts as killed after this time without a line."""
_MOST_MEMORY_POINTS = 10**6
_OUTCOMES = {"finished": contents.FINISHED, "preempted": contents.PREEMPTED, "stopped": contents.STOPPED}


@dataclass
class Part:
    """Lines of one attempt, with its start line; lines of an old log have no start line."""

    start: Line
    lines: list[Line] = field(default_factory=list)
    limit: float = math.inf
    """Last step that counts."""

    @property
    def first_step(self) -> int:
        return int(self.start.get("step", 0))

    @property
    def last_step(self) -> int:
        return max([self.first_step, *(int(line["step"]) for line in self.lines)])

    @property
    def end(self) -> Line | None:
        return next((line for line in self.lines if line["kind"] == "end"), None)

    @property
    def began(self) -> float | None:
        return self.start.get("time") or next((line["time"] for line in self.lines if "time" in line), None)

    @property
    def last_time(self) -> float | None:
        return max((line["time"] for line in (self.start, *self.lines) if "time" in line), default=None)


def split(lines: Sequence[Line]) -> list[Part]:
    """Return the attempts in order; steps after the resume of a later attempt do not count."""
    parts: list[Part] = []
    for line in lines:
        if line["kind"] == "start":
            parts.append(Part(line))
        else:
            if not parts:
                parts.append(Part({}))
            parts[-1].lines.append(line)
    limit = math.inf
    for part in reversed(parts):
        part.limit = limit
        limit = min(limit, part.first_step)
    return parts


# --- curves


def curves(parts: Sequence[Part]) -> dict[str, list[Point]]:
    """Return the values of log and evaluation lines by name, in the order of the file."""
    found: dict[str, list[Point]] = {}
    for part in parts:
        for line in part.lines:
            if line["kind"] in ("log", "evaluate"):
                for name, value in _values(line):
                    point = Point(line["step"], line.get("time"), value, line["step"] <= part.limit)
                    found.setdefault(name, []).append(point)
    return {name: _once(points) for name, points in found.items()}


def memory_curves(parts: Sequence[Part]) -> list[list[Point]]:
    """Return the memory of each rank; of very many values, those of every n-th line."""
    found: list[list[Point]] = []
    lines = [(part, line) for part in parts for line in part.lines if isinstance(line.get("memory"), list)]
    every = 1 + sum(len(line["memory"]) for _, line in lines) // _MOST_MEMORY_POINTS
    for part, line in lines[::every]:
        for rank, value in enumerate(line["memory"]):
            if (size := number(value)) is not None:
                found += [[] for _ in range(rank + 1 - len(found))]
                found[rank].append(Point(line["step"], line.get("time"), size, line["step"] <= part.limit))
    return found


def _values(line: Line) -> Iterator[tuple[str, float]]:
    for name, value in line.items():
        if name in _NOT_DRAWN or name.startswith("train_"):
            continue
        # An old log stores NaN as null.
        if value is None and name in ("loss", "grad_norm", "eval_loss"):
            yield name, math.nan
        elif (found := number(value)) is not None:
            yield name, found


def _once(points: Sequence[Point]) -> list[Point]:
    """Return the points without a counting value that a later attempt replaced at the same step."""
    newest = {point.step: place for place, point in enumerate(points) if point.counts}
    return [
        point if not point.counts or newest[point.step] == place else point._replace(counts=False)
        for place, point in enumerate(points)
    ]


# --- attempts and events


def attempts(parts: Sequence[Part], failures: Sequence[Failure], now: float) -> list[Attempt]:
    """Return what became of each start."""
    found = []
    for number_, part in enumerate(parts, 1):
        is_last = number_ == len(parts)
        outcome, detail, ended = _outcome(part, failures, is_last, now)
        # A failed attempt may have completed steps after its last line.
        noted = [one.step for one in failures if one.attempt == part.start.get("attempt")]
        last_step = max([part.last_step, *noted])
        start = part.start
        found.append(
            Attempt(
                number=number_,
                identity=text(start.get("attempt")),
                first_step=part.first_step,
                last_step=last_step,
                counts_until=int(min(part.limit, last_step)),
                process_started=time_of(start.get("process_started")),
                began=part.began,
                ended=ended,
                outcome=outcome,
                detail=detail,
                resumed_from=_name(start.get("resumed_from")),
                host=text(start.get("host")),
                world_size=whole_number(start.get("world_size")) or None,
                trainer=text(start.get("trainer")),
            )
        )
    return found


def _name(path: object) -> str | None:
    return os.path.basename(os.path.normpath(path)) if isinstance(path, str) and path else None


def _outcome(part: Part, failures: Sequence[Failure], is_last: bool, now: float) -> tuple[str, str, float | None]:
    own = [one for one in failures if one.attempt == part.start.get("attempt")]
    if own:
        moment = seconds_of(own[-1].time)
        return contents.FAILED, str(own[0]), max(filter(None, (moment, part.last_time)), default=None)
    if part.end is not None:
        reason = text(part.end.get("reason")) or contents.FINISHED
        detail = text(part.end.get("signal")) or text(part.end.get("by")) or ""
        return _OUTCOMES.get(reason, contents.FINISHED), detail, part.end.get("time")
    if not part.start:
        # An old log does not tell how the run ended. The final record has the run time.
        is_done = any("train_runtime" in line for line in part.lines)
        return (contents.FINISHED if is_done else contents.STOPPED), "", part.last_time
    if is_last and _is_alive(part, now):
        return contents.RUNNING, "", part.last_time
    return contents.KILLED, "ended without a message, such as by SIGKILL or a power failure", part.last_time


def _is_alive(part: Part, now: float) -> bool:
    start = part.start
    if start.get("host") != socket.gethostname():
        return part.last_time is not None and now - part.last_time < _SILENCE_SECONDS
    worker = start.get("pid")
    if has_launcher(part):
        return True
    if type(worker) is not int:
        return False
    began, recorded = process_started(worker), number(start.get("process_started"))
    # The number of a dead process may belong to another one now.
    return began is not None and (recorded is None or abs(began - recorded) < 2)


def has_launcher(part: Part) -> bool:
    """Return whether the launcher of an attempt still runs on this machine."""
    launcher, began = part.start.get("launcher_pid"), part.began
    if part.start.get("host") != socket.gethostname() or type(launcher) is not int or began is None:
        return False
    started = process_started(launcher)
    return started is not None and started <= began


def seconds_of(moment: str) -> float | None:
    """Return a time in ISO format as seconds since 1970; None if it is damaged."""
    try:
        return datetime.fromisoformat(moment).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def events(found: Sequence[Attempt], failures: Sequence[Failure], saves: Sequence[Line]) -> list[Event]:
    """Return the marks of all attempts and saves, oldest first."""
    marks: list[Event] = []
    for one in found:
        if one.number > 1:
            begun = (
                f"resumed at step {one.first_step}" if one.resumed_from else f"started again at step {one.first_step}"
            )
            marks.append(Event("restart", one.began, one.first_step, begun))
        if one.outcome in (contents.FAILED, contents.KILLED, contents.PREEMPTED, contents.STOPPED) and one.identity:
            detail = f" ({one.detail})" if one.detail else ""
            marks.append(Event(one.outcome, one.ended, one.last_step, f"{one.outcome} at step {one.last_step}{detail}"))
    known = {one.identity for one in found}
    marks += [
        Event("checkpoint", line.get("time"), line["step"], text(line.get("name")) or "checkpoint") for line in saves
    ]
    for failure in failures:
        if failure.attempt not in known:
            marks.append(Event(contents.FAILED, seconds_of(failure.time), failure.step, str(failure)))
    return sorted(marks, key=lambda mark: (mark.time or 0.0, mark.step))


# --- goodput


def goodput(parts: Sequence[Part], found: Sequence[Attempt]) -> Goodput | None:
    """Return the division of the wall time; None if the lines have no times in steps."""
    if not any("busy" in line for part in parts for line in part.lines):
        return None
    first, last = found[0].process_started or found[0].began, found[-1].ended
    if first is None or last is None or last <= first:
        return None
    counting = repeated = other = setup = 0.0
    for part, attempt in zip(parts, found, strict=True):
        if attempt.began is None or attempt.ended is None:
            continue
        marks = _busy_marks(part)
        useful = _busy_at(marks, min(part.limit, part.last_step))
        counting, repeated = counting + useful, repeated + marks[-1][1] - useful
        other += max(attempt.ended - attempt.began - marks[-1][1], 0.0)
        setup += max(attempt.began - (attempt.process_started or attempt.began), 0.0)
    # Clocks of steps and of lines differ by milliseconds: the parts must not exceed the whole.
    wall = max(last - first, counting + repeated + other + setup)
    down = max(wall - counting - repeated - other - setup, 0.0)
    return Goodput(min(counting / wall, 1.0), wall, counting, repeated, other, setup, down)


def _busy_marks(part: Part) -> list[tuple[int, float]]:
    """Return completed steps and the seconds in them since the start, in rising order."""
    marks = [(part.first_step, 0.0)]
    for line in part.lines:
        seconds = number(line.get("busy"))
        if seconds is not None and math.isfinite(seconds) and seconds >= marks[-1][1]:
            marks.append((line["step"], seconds))
    return marks


def _busy_at(marks: Sequence[tuple[int, float]], step: float) -> float:
    """Return the seconds until a step, interpolated between two lines."""
    for (left, low), (right, high) in itertools.pairwise(marks):
        if left <= step < right:
            return low + (high - low) * (step - left) / (right - left)
    return marks[-1][1]
