"""Timelines of a pipeline step as inline SVG: one lane for each stage of a rank, one box for each computation."""

from collections.abc import Iterator

from forgather.tools.report import svg
from forgather.tools.report.contents import Slot, Timeline
from forgather.tools.report.scales import Format, format_seconds, nice_step, short_number, time_scale, value_scale

_LANE, _GAP, _TOP, _BOTTOM = 18, 7, 4, 34
_STYLES = {
    "forward": ("forward", "w-forward"),
    "backward": ("backward", "w-backward"),
    "input gradient": ("input gradient", "w-input"),
    "weight gradient": ("weight gradient", "w-weight"),
}
_MOST_LANES = 64


def draw_timeline(timeline: Timeline, heading: str, in_seconds: bool) -> str:
    """Return the figure of a timeline, in two sizes."""
    drawn = "".join(_draw(timeline, width, name, in_seconds) for width, name in ((1100, "wide"), (356, "narrow")))
    works = [work for work in _STYLES if any(slot.work == work for row in timeline.slots for slot in row)]
    items = [svg.element("li", svg.element("span", class_=f"swatch box {_STYLES[work][1]}"), work) for work in works]
    legend = svg.element("ul", *items, class_="legend")
    return svg.element("figure", svg.element("figcaption", svg.clean(heading)), legend, drawn, class_="chart full")


def _draw(timeline: Timeline, width: int, name: str, in_seconds: bool) -> str:
    lanes = _lanes(timeline)
    left = 118.0 if name == "wide" else 92.0
    bottom = max((y for *_, y in lanes), default=_TOP) + _LANE
    num_ticks = 8 if name == "wide" else 3
    if in_seconds:
        scale = time_scale(timeline.span, left, width - 12, num_ticks)
        label: Format = scale.label
    else:
        scale = value_scale([0.0, timeline.span], left, width - 12, num_ticks, True, short_number, False)
        label = scale.label
    parts = []
    for tick in scale.ticks:
        at = scale(tick)
        parts.append(svg.line(at, _TOP, at, bottom + 4, class_="grid"))
        parts.append(svg.text(label(tick), min(at, width - 16), bottom + 17, class_="tick middle"))
    for rank, stage, slots, y in lanes:
        parts.append(
            svg.text(
                f"rank {rank} · stage {stage}" if name == "wide" else f"rank {rank} · st. {stage}",
                left - 8,
                y + 13,
                class_="tick end",
            )
        )
        parts.append(svg.element("rect", x=left, y=y, width=width - 12 - left, height=_LANE, class_="lane"))
        for slot in slots:
            parts += _box(slot, scale(slot.begin), scale(slot.end), y, in_seconds)
    unit = "time since the first computation" if in_seconds else "time, in forward passes of a rank"
    parts.append(svg.text(unit, width - 12, bottom + 31, class_="axis-name end"))
    return svg.element(
        "svg", *parts, class_=f"timeline {name}", viewBox=f"0 0 {width} {bottom + _BOTTOM}", role="img", aria_label=unit
    )


def _lanes(timeline: Timeline) -> list[tuple[int, int, list[Slot], int]]:
    """Return rank, stage, slots and position of each lane."""
    lanes = []
    y = _TOP
    for rank, slots in zip(timeline.ranks, timeline.slots, strict=True):
        for stage in sorted({slot.stage for slot in slots}):
            lanes.append((rank, stage, [slot for slot in slots if slot.stage == stage], y))
            y += _LANE + 1
        y += _GAP
    return lanes[:_MOST_LANES]


def _box(slot: Slot, begin: float, end: float, y: int, in_seconds: bool) -> Iterator[str]:
    took = _took(slot.end - slot.begin) if in_seconds else short_number(slot.end - slot.begin)
    tip = f"{slot.work} of micro-batch {slot.microbatch} in stage {slot.stage}: {took}"
    style = _STYLES.get(slot.work, ("", "w-forward"))[1]
    yield svg.element(
        "rect",
        svg.title(tip),
        x=round(begin, 2),
        y=y + 1,
        width=round(max(end - begin - 0.6, 0.6), 2),
        height=_LANE - 2,
        class_=f"slot {style}",
    )
    if end - begin >= 7 * len(str(slot.microbatch)) + 3:
        yield svg.text(slot.microbatch, (begin + end) / 2, y + 13, class_=f"slot-text {style}-text")


def _took(seconds: float) -> str:
    step = nice_step(seconds / 10) if seconds > 0 else 1.0
    return format_seconds(float(f"{seconds:.3g}"), step * 10)
