"""Pipeline steps of a run record: timelines with bubble share and slowest stage, as planned and as measured."""

import itertools
from collections.abc import Sequence
from typing import Any

from forgather.ml.trainer.callbacks.support.record_file import Line
from forgather.tools.report.contents import PipelineStep, Slot, Timeline
from forgather.tools.report.lines import LARGEST_STEP, number, text, whole_number

_MOST_STEPS = 3


def pipeline_steps(lines: Sequence[Line]) -> list[PipelineStep]:
    """Return the measured steps, newest first; a run has one for each start."""
    found = (step for line in reversed(lines) if line["kind"] == "schedule" and (step := _step(line)) is not None)
    return list(itertools.islice(found, _MOST_STEPS))


def _step(line: Line) -> PipelineStep | None:
    pipelines = line.get("pipelines")
    measured = [
        one
        for pipeline in (pipelines if isinstance(pipelines, list) else [])
        if (one := _timeline(pipeline.get("ranks") if isinstance(pipeline, dict) else None)) is not None
    ]
    if not measured:
        return None
    busy = _busy_by_stage(measured[0])
    return PipelineStep(
        schedule=text(line.get("schedule")) or "unknown",
        step=whole_number(line.get("of_step")) or line["step"],
        n_microbatches=whole_number(line.get("n_microbatches")),
        planned=_timeline(line.get("planned")),
        planned_problem=text(line.get("planned_problem")),
        measured=measured,
        num_pipelines=whole_number(line.get("num_pipelines")) or len(measured),
        busy_by_stage=busy,
        slowest_stage=max(busy, key=lambda stage: busy[stage]) if busy else None,
    )


def _timeline(ranks: object) -> Timeline | None:
    rows = [row for row in ranks if isinstance(row, dict)] if isinstance(ranks, list) else []
    slots = [[slot for one in _list(row.get("slots")) if (slot := _slot(one)) is not None] for row in rows]
    flat = [slot for row in slots for slot in row]
    if not flat:
        return None
    begin, end = min(slot.begin for slot in flat), max(slot.end for slot in flat)
    busy = sum(slot.end - slot.begin for slot in flat)
    span = end - begin
    share = 1 - busy / (span * len(rows)) if span > 0 else 0.0
    shifted = [[slot._replace(begin=slot.begin - begin, end=slot.end - begin) for slot in row] for row in slots]
    return Timeline([whole_number(row.get("rank")) for row in rows], shifted, span, max(share, 0.0))


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _slot(value: object) -> Slot | None:
    if not isinstance(value, list) or len(value) != 5:
        return None
    stage, work, microbatch, begin, end = value
    numbers = [number(one) for one in (stage, microbatch, begin, end)]
    is_plausible = all(one is not None and abs(one) <= LARGEST_STEP for one in numbers)
    if not isinstance(work, str) or not is_plausible or end < begin:
        return None
    return Slot(int(stage), work, int(microbatch), float(begin), float(end))


def _busy_by_stage(timeline: Timeline) -> dict[int, float]:
    busy: dict[int, float] = {}
    for slot in (slot for row in timeline.slots for slot in row):
        busy[slot.stage] = busy.get(slot.stage, 0.0) + slot.end - slot.begin
    return dict(sorted(busy.items()))
