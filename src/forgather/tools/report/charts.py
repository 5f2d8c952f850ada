"""Line charts as inline SVG: curves with gaps, repeated parts, marks of events, and data for tooltips.

A chart is drawn twice, for wide and for narrow screens, because text in a scaled SVG becomes unreadable.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from forgather.tools.report import svg
from forgather.tools.report.scales import Format, Scale, step_scale, time_scale, value_scale

_TOP, _BOTTOM, _RIGHT = 26, 34, 14
_LETTERS = {"restart": "R", "failed": "F", "killed": "K", "preempted": "P", "stopped": "S"}
_MARK_DISTANCE = 17
_TEXT_WIDTH = 6.4

XY = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """Values by x; `repeated` holds the values of steps that were done again, in one piece for each attempt."""

    label: str
    style: str
    points: Sequence[XY]
    repeated: Sequence[Sequence[XY]] = ()
    has_dots: bool = False

    @property
    def all_points(self) -> list[XY]:
        return [*self.points, *(point for piece in self.repeated for point in piece)]


@dataclass(frozen=True)
class Mark:
    """Event at x: a letter in a circle with a line, or a diamond on the axis for a checkpoint."""

    x: float
    kind: str
    text: str


@dataclass(frozen=True)
class Chart:
    """Chart with one x axis ("step" or "time") and one y axis."""

    title: str
    unit: str
    curves: Sequence[Curve]
    x_kind: str = "step"
    marks: Sequence[Mark] = ()
    bands: Sequence[XY] = ()
    """Ranges of x that were done again."""
    breaks: Sequence[float] = ()
    """Positions that no line may cross, such as restarts on a time axis."""
    from_zero: bool = False
    may_be_log: bool = True
    format: Format | None = None
    note: str = ""
    is_wide: bool = False
    legend: Sequence[tuple[str, str]] = field(default_factory=list)

    def draw(self) -> str:
        """Return the figure with its legend."""
        sizes = (
            ((1100, 320, "wide"), (356, 250, "narrow")) if self.is_wide else ((540, 230, "wide"), (356, 220, "narrow"))
        )
        heading = svg.element(
            "figcaption", svg.clean(self.title), svg.element("span", svg.clean(self.unit), class_="unit")
        )
        drawn = "".join(_Drawing(self, width, height, name).svg() for width, height, name in sizes)
        note = svg.element("p", svg.clean(self.note), class_="note") if self.note else ""
        name = "chart full" if self.is_wide else "chart"
        return svg.element("figure", heading, _legend(self), drawn, note, class_=name)


def _legend(chart: Chart) -> str:
    entries = [(curve.label, f"swatch {curve.style}") for curve in chart.curves if len(chart.curves) > 1]
    entries += [(label, f"swatch {style}") for label, style in chart.legend]
    items = [svg.element("li", _swatch(style, label), svg.clean(_words(style, label))) for label, style in entries]
    return svg.element("ul", *items, class_="legend") if items else ""


def _swatch(style: str, label: str) -> str:
    # The key of a mark has its letter inside.
    return svg.element("span", svg.clean(label[0]) if " key " in style else "", class_=style)


def _words(style: str, label: str) -> str:
    return label[2:] if " key " in style else label


class _Drawing:
    """One size of a chart."""

    def __init__(self, chart: Chart, width: int, height: int, name: str) -> None:
        self._chart, self._width, self._height, self._name = chart, width, height, name
        values = [y for curve in chart.curves for _, y in curve.all_points if math.isfinite(y)]
        self._bottom = height - _BOTTOM
        num_ticks = max(3, (self._bottom - _TOP) // 42)
        self.y = value_scale(values, self._bottom, _TOP, num_ticks, chart.from_zero, chart.format, chart.may_be_log)
        longest = max((len(self.y.label(tick)) for tick in self.y.ticks), default=1)
        self._left = 14 + _TEXT_WIDTH * longest
        self.x = self._x_scale()

    def _x_scale(self) -> Scale:
        chart, start, end = self._chart, self._left, self._width - _RIGHT
        xs = [x for curve in chart.curves for x, _ in curve.all_points]
        xs += [mark.x for mark in chart.marks]
        num_ticks = max(3, int((end - start) // 84))
        if chart.x_kind == "time":
            return time_scale(max(xs, default=1.0), start, end, num_ticks)
        return step_scale(min(xs, default=0.0), max(xs, default=1.0), start, end, num_ticks)

    def svg(self) -> str:
        chart = self._chart
        parts = [
            *self._bands(),
            *self._axes(),
            *(one for curve in chart.curves for one in self._curve(curve)),
            *self._marks(),
            svg.line(0, _TOP, 0, self._bottom, class_="cursor"),
        ]
        return svg.element(
            "svg",
            *parts,
            class_=f"plot {self._name}",
            viewBox=f"0 0 {self._width} {self._height}",
            role="img",
            aria_label=f"{chart.title} {chart.unit}",
            data_kind=chart.x_kind,
        )

    def _axes(self) -> Iterator[str]:
        right = self._width - _RIGHT
        for tick in self.y.ticks:
            at = self.y(tick)
            yield svg.line(self._left, at, right, at, class_="grid")
            yield svg.text(self.y.label(tick), self._left - 7, at + 4, class_="tick end")
        for tick in self.x.ticks:
            at = self.x(tick)
            # Labels at the edges are moved inwards, where they are not cut off.
            label = self.x.label(tick)
            half = len(label) * _TEXT_WIDTH / 2
            yield svg.line(at, self._bottom, at, self._bottom + 4, class_="axis")
            yield svg.text(label, min(max(at, half), self._width - half - 1), self._bottom + 17, class_="tick middle")
        yield svg.line(self._left, self._bottom, right, self._bottom, class_="axis")
        name = "step" if self._chart.x_kind == "step" else "time since the start"
        yield svg.text(name, right, self._height - 3, class_="axis-name end")

    def _bands(self) -> Iterator[str]:
        for begin, end in self._chart.bands:
            left, right = self.x(max(begin, self.x.low)), self.x(min(end, self.x.high))
            if right > left:
                yield svg.element(
                    "rect",
                    svg.title("done again after a restart"),
                    x=round(left, 1),
                    y=_TOP,
                    width=round(right - left, 1),
                    height=self._bottom - _TOP,
                    class_="band",
                )

    # --- curves

    def _curve(self, curve: Curve) -> Iterator[str]:
        buckets = max(int((self._width - _RIGHT - self._left) / 2), 50)
        lost = [(points, f"line repeated {curve.style}") for points in curve.repeated]
        for points, style in (*lost, (curve.points, f"line {curve.style}")):
            pieces = [decimate(piece, buckets) for piece in segments(points, self._chart.breaks)]
            kept = [point for piece in pieces for point in piece]
            if kept:
                path = " ".join(_path(piece, self._place) for piece in pieces)
                yield svg.element("path", d=path, class_=style, data_label=curve.label, data_v=_data(kept))
            for piece in pieces:
                if len(piece) == 1 or curve.has_dots:
                    yield from (self._dot(point, curve, "faint" if "repeated" in style else "") for point in piece)
            yield from self._missing(points, curve.label)

    def _place(self, point: XY) -> XY:
        return self.x(point[0]), self.y(point[1])

    def _dot(self, point: XY, curve: Curve, extra: str) -> str:
        x, y = self._place(point)
        return svg.element("circle", cx=round(x, 1), cy=round(y, 1), r=3, class_=f"dot {curve.style} {extra}".strip())

    def _missing(self, points: Sequence[XY], label: str) -> Iterator[str]:
        """Yield a mark at the top for values that are not finite."""
        last = -math.inf
        for at, value in points:
            if math.isfinite(value):
                continue
            x = self.x(at)
            if x - last >= 3:
                last = x
                tip = svg.title(f"{label} is {'NaN' if math.isnan(value) else 'infinite'} at {self.x.label(at)}")
                shape = f"M{x - 4:.1f} {_TOP}h8l-4 7z"
                yield svg.element("path", tip, d=shape, class_="nan")

    # --- marks

    def _marks(self) -> Iterator[str]:
        yield from self._diamonds([mark for mark in self._chart.marks if mark.kind in ("checkpoint", "best")])
        rows = [-math.inf] * 3
        for mark in self._chart.marks:
            letter = _LETTERS.get(mark.kind)
            if letter is None:
                continue
            x = min(max(self.x(mark.x), 9), self._width - 9)
            # Marks that would overlap go into another row.
            row = next((number for number, end in enumerate(rows) if x - end >= _MARK_DISTANCE), 2)
            rows[row] = x
            y = 10 + row * 15
            stem = svg.line(self.x(mark.x), y, self.x(mark.x), self._bottom, class_=f"stem {mark.kind}")
            badge = svg.element("circle", cx=round(x, 1), cy=y, r=8, class_=f"badge {mark.kind}")
            yield svg.element(
                "g", svg.title(mark.text), stem, badge, svg.text(letter, x, y + 4, class_="letter"), class_="mark"
            )

    def _diamonds(self, marks: Sequence[Mark]) -> Iterator[str]:
        last = -math.inf
        for mark in sorted(marks, key=lambda one: one.x):
            x = self.x(mark.x)
            # Thousands of checkpoints would only draw a black bar.
            if x - last < 3 and mark.kind != "best":
                continue
            last, y = x, self._bottom
            shape = f"M{x:.1f} {y - 5}l5 5l-5 5l-5 -5z"
            yield svg.element("path", svg.title(mark.text), d=shape, class_=f"diamond {mark.kind}")


def segments(points: Sequence[XY], breaks: Sequence[float] = ()) -> list[list[XY]]:
    """Return the runs of finite points; a value that is not finite, and a break, divide them."""
    pieces: list[list[XY]] = [[]]
    for x, y in points:
        before = pieces[-1][-1][0] if pieces[-1] else None
        crosses = before is not None and any(before < one <= x for one in breaks)
        if not math.isfinite(y) or crosses:
            pieces.append([])
        if math.isfinite(y):
            pieces[-1].append((x, y))
    return [piece for piece in pieces if piece]


def decimate(points: Sequence[XY], num_buckets: int) -> list[XY]:
    """Return at most five points per bucket of x: first, smallest, largest, last and one that is not finite.

    Spikes and gaps stay visible.
    """
    if len(points) <= 4 * num_buckets:
        return list(points)
    low, high = points[0][0], points[-1][0]
    width = (high - low) / num_buckets or 1.0
    buckets: dict[int, list[XY]] = {}
    for point in points:
        buckets.setdefault(min(int((point[0] - low) / width), num_buckets - 1), []).append(point)
    kept: list[XY] = []
    for bucket in buckets.values():
        places = {0, len(bucket) - 1}
        finite = [place for place, (_, y) in enumerate(bucket) if math.isfinite(y)]
        if finite:
            places |= {extreme(finite, key=lambda place: bucket[place][1]) for extreme in (min, max)}
        places |= set([place for place, (_, y) in enumerate(bucket) if not math.isfinite(y)][:1])
        kept += [bucket[place] for place in sorted(places)]
    return kept


def _path(points: Sequence[XY], place: Callable[[XY], XY]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in map(place, points))


def _data(points: Sequence[XY]) -> str:
    return " ".join(f"{x:.10g}:{y:.6g}" for x, y in points)
