"""Drawings of pipeline schedules, as torch runs them. `python docs/draw_schedules.py` writes them to docs/images."""

import io
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Rectangle

from forgather.ml.trainer.pipeline.schedules import SCHEDULES, ScheduleTraits
from forgather.ml.trainer.pipeline.schedules.timeline import TimedSlot, Work, bubble_share, timeline

IMAGES_PATH = Path(__file__).parent / "images"
NUM_RANKS, NUM_MICROBATCHES = 4, 8
# The step time of GPipe. With one scale for all drawings, shorter steps look shorter.
TIME_SHOWN = 3 * (NUM_MICROBATCHES + NUM_RANKS - 1)
TONES = {
    Work.FORWARD: ("#9ec5f4", "#2f6fbd"),
    Work.BACKWARD: ("#f7c08a", "#c8690b"),
    Work.INPUT_GRADIENT: ("#a5dcc2", "#22835a"),
    Work.WEIGHT_GRADIENT: ("#e3b4dc", "#96438a"),
}
IDLE = "#eeeeee"
STYLE: dict[Any, Any] = {
    # Keep text as text, and the output deterministic: the same schedule gives the same bytes.
    "svg.fonttype": "none",
    "svg.hashsalt": "schedules",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
}


def main() -> None:
    """Write one drawing per schedule."""
    IMAGES_PATH.mkdir(exist_ok=True)
    for schedule_class, traits in SCHEDULES.items():
        write(schedule_class, IMAGES_PATH / image_name(traits))


def image_name(traits: ScheduleTraits) -> str:
    """Return the file name of a schedule's drawing."""
    return f"schedule_{traits.name}.svg"


def write(schedule_class: type, path: Path) -> None:
    """Draw one schedule into a file."""
    drawing = io.StringIO()
    with rc_context(STYLE):
        figure = _figure(schedule_class)
        figure.savefig(drawing, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})
    # Strip the trailing blanks that matplotlib writes after lines of a path.
    path.write_text("".join(line.rstrip() + "\n" for line in drawing.getvalue().splitlines()), encoding="utf-8")


def box_id(rank: int, timed: TimedSlot) -> str:
    """Return the id of a box in the file: rank, stage, work, micro-batch and time."""
    slot = timed.slot
    return (
        f"rank{rank}.stage{slot.stage}.{slot.work.replace(' ', '-')}.{slot.microbatch}.at{timed.start:g}to{timed.end:g}"
    )


def _figure(schedule_class: type) -> Figure:
    figure = Figure(figsize=(11, 2.9))
    axes = figure.add_subplot()
    figure.subplots_adjust(left=0.065, right=0.985, top=0.88, bottom=0.3)
    times = timeline(schedule_class, NUM_RANKS, NUM_MICROBATCHES)
    total = max(timed.end for slots in times for timed in slots)
    for rank, slots in enumerate(times):
        axes.add_patch(Rectangle((0, rank - 0.45), total, 0.9, color=IDLE, linewidth=0, clip_on=False))
        for timed in slots:
            _draw_box(axes, rank, timed)
    _label(axes, schedule_class, total)
    _add_legend(figure, times)
    return figure


def _draw_box(axes: Axes, rank: int, timed: TimedSlot) -> None:
    is_second = timed.slot.stage >= NUM_RANKS
    box = Rectangle((timed.start, rank - 0.45), timed.end - timed.start, 0.9, clip_on=False)
    box.set(facecolor=TONES[timed.slot.work][is_second], edgecolor="white", linewidth=0.7, gid=box_id(rank, timed))
    axes.add_patch(box)
    axes.text(
        (timed.start + timed.end) / 2,
        rank,
        str(timed.slot.microbatch),
        ha="center",
        va="center_baseline",
        fontsize=8,
        color="white" if is_second else "black",
    )


def _label(axes: Axes, schedule_class: type, total: float) -> None:
    traits = SCHEDULES[schedule_class]
    bubble = bubble_share(schedule_class, NUM_RANKS, NUM_MICROBATCHES)
    stages = f"{traits.default_stages_per_rank} stage{'s' * (traits.default_stages_per_rank > 1)} each"
    axes.set_title(
        f"{traits.name}: {NUM_RANKS} ranks, {stages}, {NUM_MICROBATCHES} micro-batches; "
        f"{bubble:.1%} of the time is idle, a step takes {total:g}",
        loc="left",
        fontsize=10.5,
    )
    axes.set(xlim=(0, TIME_SHOWN), ylim=(NUM_RANKS - 0.5, -0.5), xticks=range(0, TIME_SHOWN + 1, 3))
    axes.set_yticks(range(NUM_RANKS), [f"rank {rank}" for rank in range(NUM_RANKS)])
    axes.set_xlabel(
        "time in forward passes of a micro-batch through one rank's layers; the numbers are micro-batches", labelpad=2
    )
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _add_legend(figure: Figure, times: list[list[TimedSlot]]) -> None:
    slots = [timed.slot for timed_slots in times for timed in timed_slots]
    works = [work for work in Work if any(slot.work is work for slot in slots)]
    tones = 2 if any(slot.stage >= NUM_RANKS for slot in slots) else 1
    handles: list[Any] = [tuple(Rectangle((0, 0), 1, 1, color=tone) for tone in TONES[work][:tones]) for work in works]
    labels = [f"{work} (first / second stage)" if tones == 2 else str(work) for work in works]
    figure.legend(
        [*handles, (Rectangle((0, 0), 1, 1, color=IDLE),)],
        [*labels, "idle"],
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0.2)},
        loc="lower center",
        ncols=len(works) + 1,
        frameon=False,
        fontsize=8,
        handlelength=2.2 if tones == 2 else 1.1,
        columnspacing=1.4,
    )


if __name__ == "__main__":
    main()
