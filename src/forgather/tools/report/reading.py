"""Reading of an output directory into a `RunReport`: record, failures, checkpoints, configuration.

Everything in the directory is untrusted data. A file that cannot be read is listed in `problems`, and the rest is shown.
"""

import itertools
import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace

from forgather._run_files import open_in_run
from forgather.config.yaml_reader import CONFIG_NAME
from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.errors import CheckpointError
from forgather.ml.checkpoint.files.eval_metrics import load_checkpoint_metrics
from forgather.ml.checkpoint.files.layout import CHECKPOINTS_FOLDER, IN_OUTPUT_DIR, checkpoints_root, counts_any_name
from forgather.ml.checkpoint.metadata import CheckpointMetadata
from forgather.ml.trainer.callbacks.support.record_file import Line
from forgather.ml.trainer.elastic.failure_notes import read_failures
from forgather.tools.report import contents, history
from forgather.tools.report.contents import Attempt, CheckpointRow, RunReport, Sample
from forgather.tools.report.errors import ReportError
from forgather.tools.report.lines import LARGEST_STEP, find_lines, number, whole_number
from forgather.tools.report.pipeline_steps import pipeline_steps

logger = logging.getLogger(__name__)

_MOST_CONFIG_BYTES = 2**20
_MOST_SAMPLES = 200


def read_run(output_dir: str) -> RunReport:
    """Return everything that the files of an output directory tell about its run.

    Raise `ReportError` for a directory without a run.
    """
    if not os.path.isdir(output_dir):
        kind = "it is a file" if os.path.exists(output_dir) else "there is no such directory"
        raise ReportError(
            f"There is no run at {output_dir!r}: {kind}. Give the output directory (args.output_dir) of a run."
        )
    now, problems = time.time(), list[str]()
    source, lines = find_lines(output_dir)
    rows = _checkpoints(output_dir, problems)
    failures = [one for one in read_failures(output_dir) if 0 <= one.step < LARGEST_STEP]
    if not lines and not rows and not failures:
        raise ReportError(
            f"{output_dir!r} has nothing to report: no run_record.jsonl, trainer_logs.jsonl, trainer_state.json, "
            f"failures.jsonl or checkpoint.{_hint(output_dir)}"
        )
    parts = history.split(lines)
    attempts = history.attempts(parts, failures, now)
    start = parts[-1].start if parts else {}
    return RunReport(
        output_dir=os.path.abspath(output_dir),
        made=now,
        source=source,
        state=_state(parts, attempts),
        step=max([0, *(one.last_step for one in attempts[-1:]), *(row.step or 0 for row in rows if not parts)]),
        max_steps=whole_number(start.get("max_steps")) or None,
        series=history.curves(parts),
        memory=history.memory_curves(parts),
        memory_meaning=_memory_meaning(start),
        attempts=attempts,
        events=history.events(attempts, failures, _saves(lines, rows)),
        goodput=history.goodput(parts, attempts) if parts else None,
        checkpoints=rows,
        samples=_samples(lines),
        pipelines=pipeline_steps(lines),
        configuration=_configuration(output_dir, start, problems),
        summary=_summary(start),
        versions=_texts(start.get("versions")),
        problems=problems,
    )


def _hint(output_dir: str) -> str:
    inside = [name for name in sorted(os.listdir(output_dir)) if _looks_like_run(os.path.join(output_dir, name))]
    return f" Did you mean {os.path.join(output_dir, inside[0])!r}?" if inside else ""


def _looks_like_run(path: str) -> bool:
    names = ("run_record.jsonl", "trainer_logs.jsonl", CHECKPOINTS_FOLDER)
    return any(os.path.exists(os.path.join(path, name)) for name in names)


def _state(parts: Sequence[history.Part], attempts: Sequence[Attempt]) -> str:
    if not attempts:
        return contents.STOPPED
    state = attempts[-1].outcome
    if state in (contents.FAILED, contents.KILLED) and history.has_launcher(parts[-1]):
        # The launcher restarts its workers after a failure.
        return contents.RUNNING
    return state


def _memory_meaning(start: Line) -> str:
    devices = str(_texts(start.get("summary")).get("devices", ""))
    return "resident memory of the process" if devices.startswith("CPU") else "peak of allocated memory since the start"


# --- checkpoints


def _checkpoints(output_dir: str, problems: list[str]) -> list[CheckpointRow]:
    """Return the complete checkpoints of both layouts, oldest first."""
    rows: list[CheckpointRow] = []
    for layout in ("checkpoints", IN_OUTPUT_DIR):
        root = checkpoints_root(output_dir, layout)
        try:
            found = store.find_checkpoints(root, counts_any_name(layout))
        except (CheckpointError, OSError) as error:
            problems.append(f"Checkpoints in {root} could not be listed: {error}")
            continue
        rows += _rows(found, problems)
    rows.sort(key=lambda row: row.time or 0.0)
    return [*rows[:-1], *(replace(row, is_newest=True) for row in rows[-1:])]


def _rows(found: Sequence[store.FoundCheckpoint], problems: list[str]) -> list[CheckpointRow]:
    best = _best_name(found, problems)
    return [_row(one, os.path.basename(one.path) == best, problems) for one in found]


def _row(one: store.FoundCheckpoint, is_best: bool, problems: list[str]) -> CheckpointRow:
    manifest = one.manifest
    metrics: dict[str, float] = {}
    try:
        for name, value in (load_checkpoint_metrics(one.path) or {}).items():
            if (known := number(value)) is not None:
                metrics[name] = known
    except (CheckpointError, OSError) as error:
        problems.append(str(error))
    return CheckpointRow(
        name=os.path.basename(one.path),
        step=manifest.step,
        time=history.seconds_of(manifest.timestamp),
        size=sum(record.size for record in manifest.files),
        metrics=metrics,
        is_newest=False,
        is_best=is_best,
        trainer=manifest.trainer_class,
        world_size=manifest.world_size,
    )


def _best_name(found: Sequence[store.FoundCheckpoint], problems: list[str]) -> str | None:
    """Return the best checkpoint by the list of the newest one, else by the smallest evaluation loss."""
    if not found:
        return None
    try:
        listed = CheckpointMetadata.read(found[-1].path).best_checkpoints
    except (CheckpointError, OSError) as error:
        problems.append(str(error))
        listed = []
    present = {os.path.basename(one.path) for one in found}
    if named := [name for name, _ in listed if name in present]:
        return named[0]
    losses = []
    for one in found:
        try:
            loss = number((load_checkpoint_metrics(one.path) or {}).get("eval_loss"))
        except (CheckpointError, OSError):
            continue  # `_row` lists it.
        if loss is not None:
            losses.append((loss, os.path.basename(one.path)))
    return min(losses)[1] if losses else None


def _saves(lines: Sequence[Line], rows: Sequence[CheckpointRow]) -> list[Line]:
    """Return the saves of the record, which may be deleted by now; without a record, the checkpoints on disk."""
    if found := [line for line in lines if line["kind"] == "save"]:
        return found
    return [{"step": row.step, "time": row.time, "name": row.name} for row in rows if row.step is not None]


# --- texts


def _samples(lines: Sequence[Line]) -> list[Sample]:
    """Return the newest samples, oldest first."""
    listed = ((line["step"], line.get("samples")) for line in reversed(lines) if line["kind"] == "samples")
    entries = ((step, one) for step, many in listed if isinstance(many, list) for one in reversed(many))
    # Samples beyond the limit are not made: a line can have 300,000.
    found = itertools.islice(((step, one) for step, one in entries if isinstance(one, dict)), _MOST_SAMPLES)
    return [Sample(step, str(one.get("prompt", "")), str(one.get("text", ""))) for step, one in found][::-1]


def _configuration(output_dir: str, start: Line, problems: list[str]) -> str:
    """Return config.yaml, else the arguments in the start line."""
    path = os.path.join(output_dir, CONFIG_NAME)
    try:
        with open_in_run(output_dir, CONFIG_NAME) as file:
            return file.read(_MOST_CONFIG_BYTES).decode(errors="replace")
    except FileNotFoundError:
        pass
    except OSError as error:
        problems.append(f"{path} could not be read: {error.strerror or error}")
    return "\n".join(f"{name}: {json.dumps(value)}" for name, value in _texts(start.get("args")).items())


def _summary(start: Line) -> dict[str, str]:
    rows = {"trainer": start.get("trainer"), **_texts(start.get("summary"))}
    mesh = start.get("mesh")
    if isinstance(mesh, dict) and mesh:
        rows["mesh"] = " x ".join(f"{name} {size}" for name, size in mesh.items())
    rows["host"] = start.get("host")
    return {name: value for name, value in _texts(rows).items() if value}


def _texts(value: object) -> dict[str, str]:
    return {str(name): one for name, one in value.items() if isinstance(one, str)} if isinstance(value, dict) else {}
