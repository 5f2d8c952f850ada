"""PNG of a report, drawn with the code of `PlotCallback`."""

from collections.abc import Sequence

from forgather.ml.trainer.callbacks.plot import Curve, draw_png
from forgather.tools.report.contents import Point, RunReport

_NAMES = ("loss", "eval_loss", "learning_rate", "tok_per_sec", "grad_norm")
_MARKED = ("restart", "failed", "killed", "preempted", "stopped")


def draw(report: RunReport) -> bytes:
    """Return the PNG file: the curves that count, with restarts and failures marked."""
    curves = {name: _curve(points) for name in _NAMES if (points := report.series.get(name))}
    marks = [(event.step, event.kind) for event in report.events if event.kind in _MARKED]
    return draw_png(curves, marks)


def _curve(points: Sequence[Point]) -> Curve:
    curve = Curve()
    for point in sorted((one for one in points if one.counts), key=lambda one: one.step):
        curve.add(point.step, point.value)
    return curve
