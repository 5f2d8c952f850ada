"""HTML page of a report: one file without network access. All text of the run is escaped."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

from forgather.ml.trainer.callbacks.display import format_count
from forgather.tools.report import assets, contents, plots
from forgather.tools.report.contents import Attempt, CheckpointRow, Goodput, PipelineStep, RunReport, Sample
from forgather.tools.report.scales import format_bytes, format_span, short_number
from forgather.tools.report.svg import clean, element
from forgather.tools.report.timelines import draw_timeline

_NEWEST_SAMPLES = 3
_GOODPUT = (
    "Goodput is the time in training steps that count, divided by the wall time. A step counts unless it was lost and done "
    "again after a restart. The time in steps excludes evaluation, saving and callbacks of these. The wall time runs from "
    "the start of the first process to the last record, and includes set-up and the time between attempts."
)
_GOODPUT_PARTS = (
    ("counting", "steps that count", "g1"),
    ("repeated", "steps done again later", "g2"),
    ("other", "evaluation, saving, other", "g3"),
    ("setup", "set-up", "g4"),
    ("down", "not running", "g5"),
)


def render(report: RunReport, reload_seconds: float | None = None) -> str:
    """Return the page; with `reload_seconds` a browser reloads it."""
    body = "".join(_sections(report))
    reload_ = "" if reload_seconds is None else f'<meta http-equiv="refresh" content="{max(1, round(reload_seconds))}">'
    name = clean(f"{os.path.basename(report.output_dir)} - forgather report")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{clean(assets.policy())}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"{reload_}<title>{name}</title><style>{assets.STYLE}</style></head>\n"
        f"<body><main>{body}</main><script>{assets.SCRIPT}</script></body></html>\n"
    )


def _sections(report: RunReport) -> Iterator[str]:
    yield _head(report)
    charts = plots.all_charts(report)
    yield "".join(chart.draw() for chart in charts if chart.is_wide)
    yield element("div", *(chart.draw() for chart in charts if not chart.is_wide), class_="charts")
    if not charts:
        yield element("p", "No losses were recorded.", class_="soft")
    if report.goodput is not None:
        yield _goodput(report.goodput)
    yield from _attempts(report)
    for step in report.pipelines[:1]:
        yield from _pipeline(step)
    yield from _samples(report.samples)
    yield from _checkpoints(report.checkpoints)
    yield from _settings(report)


def _heading(text: str) -> str:
    return element("h2", clean(text))


# --- head


def _head(report: RunReport) -> str:
    state = element("span", clean(report.state), class_=f"state {report.state}")
    source = f" Values from {report.source}." if report.source and report.source != "run_record.jsonl" else ""
    when = f" Report of {_moment(report.made)}.{source}"
    problems = "".join(element("p", clean(problem), class_="note") for problem in report.problems)
    tiles = "".join(
        element("div", element("b", clean(value)), element("span", clean(label)), class_="tile")
        for label, value in _tiles(report)
    )
    return (
        element("h1", clean(report.output_dir))
        + element("p", state, clean(when), class_="soft")
        + problems
        + element("div", tiles, class_="tiles")
    )


def _tiles(report: RunReport) -> Iterator[tuple[str, str]]:
    planned = f" of {report.max_steps:,}" if report.max_steps else ""
    yield f"steps{planned}", f"{report.step:,}"
    for name, label in (("loss", "training loss"), ("eval_loss", "evaluation loss")):
        counting = [point for point in report.series.get(name, []) if point.counts]
        if counting:
            yield f"{label} at step {counting[-1].step:,}", short_number(counting[-1].value)
    rates = [
        point.value for point in report.series.get("tok_per_sec", []) if point.counts and math.isfinite(point.value)
    ]
    if rates:
        yield "tokens per second, median", format_count(sorted(rates)[len(rates) // 2])
    if report.goodput is not None:
        yield "goodput", f"{report.goodput.share:.1%}"
        yield "wall time", format_span(report.goodput.wall)
    if report.memory:
        yield "largest memory of a rank", format_bytes(max(one.value for rank in report.memory for one in rank))
    if len(report.attempts) > 1:
        yield "starts", str(len(report.attempts))


def _moment(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


# --- time


def _goodput(goodput: Goodput) -> str:
    parts = [(getattr(goodput, name), label, style) for name, label, style in _GOODPUT_PARTS]
    boxes, left = [], 0.0
    for seconds, label, style in parts:
        width = 1000 * seconds / goodput.wall
        tip = element("title", clean(f"{label}: {format_span(seconds)}"))
        boxes.append(element("rect", tip, x=round(left, 2), y=0, width=round(width, 2), height=22, class_=style))
        left += width
    bar = element("svg", *boxes, viewBox="0 0 1000 22", preserveAspectRatio="none", class_="bar", role="img")
    items = [
        element(
            "li",
            element("span", class_=f"swatch box {style}"),
            clean(f"{label}: {format_span(seconds)} ({seconds / goodput.wall:.1%})"),
        )
        for seconds, label, style in parts
        if seconds > 0
    ]
    legend = element("ul", *items, class_="legend")
    heading = _heading(f"Goodput {goodput.share:.1%}")
    return heading + bar + legend + element("p", clean(_GOODPUT), class_="note")


def _attempts(report: RunReport) -> Iterator[str]:
    if not report.attempts or not any(one.identity for one in report.attempts):
        return
    yield _heading("Starts, restarts and failures")
    columns = ("", "ended", "steps", "lost", "from", "began", "trained for", "ranks", "host", "detail")
    yield _table(
        columns, [_attempt_row(one) for one in report.attempts], numeric=("", "trained for", "steps", "lost", "ranks")
    )
    known = {one.identity for one in report.attempts}
    others = [
        event for event in report.events if event.kind == contents.FAILED and not _is_in(event.text, report.attempts)
    ]
    if others and known:
        rows = [[_moment(event.time), f"{event.step:,}", event.text] for event in others]
        yield element("p", "Failures of attempts that the record does not have:", class_="note")
        yield _table(("time", "step", "error"), rows, numeric=("step",))


def _is_in(text: str, attempts: Sequence[Attempt]) -> bool:
    return any(one.detail and one.detail in text for one in attempts)


def _attempt_row(one: Attempt) -> list[object]:
    seconds = None if one.began is None or one.ended is None else format_span(max(one.ended - one.began, 0.0))
    lost = one.last_step - one.counts_until
    is_bad = one.outcome in (contents.FAILED, contents.KILLED)
    return [
        one.number,
        _Chip(one.outcome, "chip bad" if is_bad else "chip"),
        f"{one.first_step:,} to {one.last_step:,}",
        f"{lost:,}" if lost > 0 else "",
        one.resumed_from or "step 0",
        _moment(one.began),
        seconds,
        one.world_size,
        one.host,
        one.detail,
    ]


# --- pipeline


def _pipeline(step: PipelineStep) -> Iterator[str]:
    first = step.measured[0]
    yield _heading(f"Pipeline: {step.schedule}, {step.n_microbatches} micro-batches")
    busy = sum(step.busy_by_stage.values()) / max(len(step.busy_by_stage), 1)
    facts = [f"Step {step.step} took {format_span(first.span)} in forward and backward passes"]
    planned = "" if step.planned is None else f" (planned: {step.planned.bubble_share:.1%})"
    facts.append(f"ranks were idle for {first.bubble_share:.1%} of it{planned}")
    if step.slowest_stage is not None and busy > 0:
        slowest = step.busy_by_stage[step.slowest_stage]
        facts.append(f"the slowest stage is {step.slowest_stage}, {slowest / busy:.2f} times the mean")
    yield element("p", clean("; ".join(facts) + "."))
    if step.planned is not None:
        heading = f"As planned, for equal stages and free communication: bubble {step.planned.bubble_share:.1%}"
        yield draw_timeline(step.planned, heading, in_seconds=False)
    elif step.planned_problem:
        yield element("p", clean(step.planned_problem), class_="note")
    yield draw_timeline(first, f"As measured in step {step.step}: bubble {first.bubble_share:.1%}", in_seconds=True)
    rows = [
        [stage, format_span(seconds), f"{seconds / busy:.2f}" if busy else ""]
        for stage, seconds in step.busy_by_stage.items()
    ]
    yield _table(
        ("stage", "time in computations", "relative to the mean"),
        rows,
        numeric=("stage", "time in computations", "relative to the mean"),
        style="table fit",
    )
    if len(step.measured) > 1:
        shares = ", ".join(f"{one.bubble_share:.1%}" for one in step.measured)
        yield element(
            "p", clean(f"Bubble of the {step.num_pipelines} pipelines: {shares}. The first is drawn."), class_="note"
        )


# --- texts and tables


def _samples(samples: Sequence[Sample]) -> Iterator[str]:
    if not samples:
        return
    yield _heading("Generated text")
    newest = samples[::-1]
    yield "".join(map(_sample, newest[:_NEWEST_SAMPLES]))
    if len(newest) > _NEWEST_SAMPLES:
        older = newest[_NEWEST_SAMPLES:]
        yield element("details", element("summary", f"{len(older)} earlier"), *map(_sample, older))


def _sample(sample: Sample) -> str:
    prompt = element("span", clean(sample.prompt), class_="prompt")
    return element(
        "div",
        element("p", f"step {sample.step:,}", class_="note"),
        element("pre", prompt, clean(sample.text)),
        class_="sample",
    )


def _checkpoints(rows: Sequence[CheckpointRow]) -> Iterator[str]:
    if not rows:
        return
    yield _heading("Checkpoints")
    names = list(
        dict.fromkeys(
            name for row in rows for name in row.metrics if not name.endswith(("_runtime", "_second", "_tokens"))
        )
    )[:4]
    table = [
        [
            row.name,
            _Chips([*(["newest"] if row.is_newest else []), *(["best"] if row.is_best else [])]),
            "" if row.step is None else f"{row.step:,}",
            _moment(row.time),
            format_bytes(row.size),
            *(short_number(row.metrics[name]) if name in row.metrics else "" for name in names),
            row.trainer or "",
            row.world_size,
        ]
        for row in reversed(rows)
    ]
    columns = ("checkpoint", "", "step", "saved", "size", *names, "trainer", "ranks")
    yield _table(columns, table, numeric=("step", "size", *names, "ranks"))


def _settings(report: RunReport) -> Iterator[str]:
    if report.summary or report.versions:
        yield _heading("Model, topology and versions")
        versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
        yield _pairs({**report.summary, **({"versions": versions} if versions else {})})
    if report.configuration:
        yield _heading("Configuration")
        yield element("pre", clean(report.configuration))


def _pairs(rows: Mapping[str, str]) -> str:
    return element("dl", *(element("dt", clean(name)) + element("dd", clean(value)) for name, value in rows.items()))


class _Chip:
    """Cell with a label in a rounded box."""

    def __init__(self, text: str, style: str = "chip") -> None:
        self.markup = element("span", clean(text), class_=style)


class _Chips(_Chip):
    def __init__(self, texts: Sequence[str]) -> None:
        self.markup = "".join(element("span", clean(text), class_=f"chip {text}") for text in texts)


def _table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], numeric: Sequence[str], style: str = "table"
) -> str:
    head = "".join(element("th", clean(name), class_="number" if name in numeric else None) for name in columns)
    body = "".join(
        element("tr", *(_cell(name, cell, numeric) for name, cell in zip(columns, row, strict=True))) for row in rows
    )
    table = element("table", element("thead", element("tr", head)), element("tbody", body))
    return element("div", table, class_=style)


def _cell(name: str, cell: object, numeric: Sequence[str]) -> str:
    if isinstance(cell, _Chip):
        return element("td", cell.markup, class_="nowrap")
    style = "number" if name in numeric else ("text" if name in ("detail", "error") else "nowrap")
    return element("td", clean("" if cell is None else cell), class_=style)
