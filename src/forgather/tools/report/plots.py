"""Charts of a report: loss over steps and over time, learning rate, gradient norm, throughput and memory of ranks."""

import math
from collections.abc import Callable, Sequence

from forgather.ml.trainer.callbacks.plot import smooth
from forgather.tools.report.charts import XY, Chart, Curve, Mark, decimate
from forgather.tools.report.contents import Attempt, Point, RunReport
from forgather.tools.report.scales import byte_unit, round_count, short_number

_COLOURS = ("c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8")
_MOST_RANKS = 8
_SMOOTHED_FROM = 60
"""Number of points from which a smoothed line is drawn over the loss."""
_MOST_SMOOTHED = 1500
_MOST_BUCKETS = 700
_RATES = (
    ("tok_per_sec", "Throughput", "tokens per second"),
    ("samples_per_second", "Throughput", "samples per second"),
)
_KEYS = {
    "restart": "R restart",
    "failed": "F failure",
    "killed": "K killed",
    "preempted": "P preemption",
    "stopped": "S stopped",
}

Xs = Callable[[Point], float | None]


def all_charts(report: RunReport) -> list[Chart]:
    """Return the charts that the run has data for."""
    charts = [_loss(report, "step"), _loss(report, "time"), _learning_rate(report), _gradient_norm(report)]
    return [chart for chart in (*charts, _throughput(report), _memory(report)) if chart is not None]


def first_time(report: RunReport) -> float | None:
    """Return the zero of the time axis: the first start of training, or the first value."""
    times = [one.began for one in report.attempts if one.began is not None]
    return min(times, default=None)


def _loss(report: RunReport, kind: str) -> Chart | None:
    losses = report.series.get("loss", [])
    evaluations = _evaluations(report)
    zero = first_time(report)
    if not (losses or evaluations) or (kind == "time" and (zero is None or not any(one.time for one in losses))):
        return None
    place = _by_step if kind == "step" else _by_time(zero or 0.0)
    training = _curve("training", "c1", losses, place)
    curves = [training]
    if len(training.points) >= _SMOOTHED_FROM:
        raw = Curve("training", "raw c1", training.points, training.repeated)
        curves = [raw, Curve("training, smoothed", "c1", _smoothed(training.points))]
    for number, (name, points) in enumerate(evaluations.items()):
        curves.append(_curve(name, _COLOURS[1 + number % 7], points, place, has_dots=True))
    title = "Loss" if kind == "step" else "Loss over time"
    marks = _marks(report, kind, zero)
    bands = _bands(report.attempts, kind, zero)
    return Chart(
        title,
        "mean over targets",
        curves,
        kind,
        marks,
        bands,
        [mark.x for mark in marks if mark.kind == "restart"] if kind == "time" else (),
        is_wide=True,
        legend=_keys(marks, bands, [*losses, *(one for points in evaluations.values() for one in points)]),
    )


def _evaluations(report: RunReport) -> dict[str, list[Point]]:
    found = {}
    for name, points in report.series.items():
        if name.startswith("eval_") and name.endswith("loss"):
            middle = name.removeprefix("eval_").removesuffix("loss").strip("_")
            found[f"evaluation {middle}".strip()] = points
    return dict(list(found.items())[:7])


def _smoothed(points: Sequence[XY]) -> list[XY]:
    """Return the smoothed curve; long curves are averaged in groups first, because smoothing is slow for them."""
    size = -(-len(points) // _MOST_SMOOTHED)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    means = [_mean([y for _, y in group]) for group in groups]
    middles = [group[len(group) // 2][0] for group in groups]
    return list(zip(middles, smooth(means), strict=True))


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def _by_step(point: Point) -> float | None:
    return float(point.step)


def _by_time(zero: float) -> Xs:
    return lambda point: None if point.time is None else max(point.time - zero, 0.0)


def _curve(
    label: str, style: str, points: Sequence[Point], place: Xs, has_dots: bool = False, scale: float = 1
) -> Curve:
    placed = [(x, one) for one in points if (x := place(one)) is not None]
    counting = sorted((x, one.value / scale) for x, one in placed if one.counts)
    # More points than pixels are drawn twice, for two sizes. They are reduced once, here.
    kept = decimate(counting, _MOST_BUCKETS)
    lost = [decimate(piece, _MOST_BUCKETS) for piece in _lost(placed, scale)]
    return Curve(label, style, kept, lost, has_dots)


def _lost(placed: Sequence[tuple[float, Point]], scale: float) -> list[list[XY]]:
    """Return the pieces of values that do not count; they end where an attempt ends."""
    pieces: list[list[XY]] = []
    was_lost = False
    for x, one in placed:
        if not one.counts:
            if not was_lost or x < pieces[-1][-1][0]:
                pieces.append([])
            pieces[-1].append((x, one.value / scale))
        was_lost = not one.counts
    return pieces


def _marks(report: RunReport, kind: str, zero: float | None) -> list[Mark]:
    best = {row.name for row in report.checkpoints if row.is_best}
    marks = []
    for event in report.events:
        if kind == "time" and (event.time is None or zero is None):
            continue
        x = float(event.step) if kind == "step" else max((event.time or 0.0) - (zero or 0.0), 0.0)
        is_best = event.kind == "checkpoint" and event.text in best
        marks.append(Mark(x, "best" if is_best else event.kind, event.text))
    return marks


def _bands(attempts: Sequence[Attempt], kind: str, zero: float | None) -> list[XY]:
    """Return the ranges of steps that were done again; a band over time would hide when they were lost."""
    if kind == "time":
        return []
    return [(one.counts_until, one.last_step) for one in attempts if one.last_step > one.counts_until]


def _keys(marks: Sequence[Mark], bands: Sequence[XY], points: Sequence[Point]) -> list[tuple[str, str]]:
    kinds = {mark.kind for mark in marks}
    keys = [("checkpoint", "diamondkey")] if "checkpoint" in kinds else []
    keys += [("best checkpoint", "bestkey")] if "best" in kinds else []
    keys += [(text, f"key {kind}") for kind, text in _KEYS.items() if kind in kinds]
    keys += [("done again after a restart", "dashed")] if any(not one.counts for one in points) or bands else []
    keys += [("not finite", "nankey")] if any(not math.isfinite(one.value) for one in points) else []
    return keys


def _learning_rate(report: RunReport) -> Chart | None:
    points = report.series.get("learning_rate")
    if not points:
        return None
    curve = _curve("learning rate", "c3", points, _by_step)
    return Chart("Learning rate", "", [curve], from_zero=True, may_be_log=False, format=short_number)


def _gradient_norm(report: RunReport) -> Chart | None:
    points = report.series.get("grad_norm")
    if not points:
        return None
    curves = [_curve("mean of the interval", "c1", points, _by_step)]
    largest = report.series.get("max_grad_norm", [])
    if any(one.value != two.value for one, two in zip(points, largest, strict=False)):
        curves.append(_curve("largest of the interval", "c2", largest, _by_step))
    return Chart("Gradient norm", "before clipping", curves, legend=_keys([], [], points))


def _throughput(report: RunReport) -> Chart | None:
    for name, title, unit in _RATES:
        if points := report.series.get(name):
            curve = _curve(unit, "c4", points, _by_step)
            return Chart(title, unit, [curve], from_zero=True, may_be_log=False, format=round_count)
    return None


def _memory(report: RunReport) -> Chart | None:
    values = [one.value for rank in report.memory for one in rank]
    if not values:
        return None
    size, unit = byte_unit(max(values))
    # Many lines cannot be told apart: the ranks with the most memory are drawn.
    ranks = sorted(range(len(report.memory)), key=lambda rank: -max((p.value for p in report.memory[rank]), default=0))
    drawn = sorted(ranks[:_MOST_RANKS])
    curves = [
        _curve(f"rank {rank}", _COLOURS[place % 8], report.memory[rank], _by_step, scale=size)
        for place, rank in enumerate(drawn)
    ]
    hidden = len(ranks) - len(drawn)
    note = f"The {_MOST_RANKS} ranks with the most memory; {hidden} others are not drawn." if hidden else ""
    return Chart(
        "Memory per rank", f"{unit}, {report.memory_meaning}", curves, from_zero=True, may_be_log=False, note=note
    )
