"""Work of `forgather checkpoint ls`: a table of the checkpoints of a run."""

import argparse
import dataclasses
from collections.abc import Mapping
from datetime import datetime

from forgather.cli.command_line import DONE
from forgather.cli.output import format_bytes, print_json, show_table
from forgather.cli.work.checkpoint.shared import usage_errors
from forgather.ml.trainer.callbacks.display import show_row
from forgather.tools.checkpoints.listing import COMPLETE, ListedCheckpoint, Listing, list_checkpoints

_MOST_METRICS = 3
_SPEEDS = ("runtime", "per_second", "tokens")


def run(options: argparse.Namespace) -> int:
    """List the checkpoints; returns the exit code."""
    with usage_errors():
        listing = list_checkpoints(options.path)
    if options.json:
        print_json("checkpoint.ls/1", as_plain_data(listing))
    elif not listing.checkpoints:
        show_row("", f"There are no checkpoints in {listing.path}.")
    else:
        _show(listing)
    return DONE


def as_plain_data(listing: Listing) -> dict[str, object]:
    """Return a listing as data that JSON can represent."""
    data = dataclasses.asdict(listing)
    for one, listed in zip(data["checkpoints"], listing.checkpoints, strict=True):
        one["name"] = listed.name
        one["complete"] = listed.status == COMPLETE
    return data


def _show(listing: Listing) -> None:
    columns = ("checkpoint", "step", "time", "size", "trainer", "ranks", "metrics", "notes")
    rows = [
        (
            one.name,
            one.step,
            _time(one.time),
            format_bytes(one.size_bytes) if one.size_bytes else None,
            one.trainer,
            one.world_size,
            shown_metrics(one.metrics),
            "; ".join(_notes(one, listing.best_metric)),
        )
        for one in listing.checkpoints
    ]
    show_table(columns, rows, numeric=("step", "size", "ranks"))


def _time(time: str | None) -> str | None:
    return None if time is None else datetime.fromisoformat(time).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def shown_metrics(metrics: Mapping[str, float]) -> str:
    """Return the first metrics as text; durations and speeds are left out."""
    shown = [(name, value) for name, value in metrics.items() if not name.endswith(_SPEEDS)]
    return ", ".join(f"{name}={value:.5g}" for name, value in shown[:_MOST_METRICS])


def _notes(one: ListedCheckpoint, metric: str | None) -> list[str]:
    notes = ["newest"] if one.is_newest else []
    if one.best_rank is not None:
        place = "best" if one.best_rank == 1 else f"best no. {one.best_rank}"
        notes.append(f"{place} ({metric})" if metric else place)
    if one.status != COMPLETE:
        notes.append(f"{one.status.upper()}: {one.reason}")
    if one.failures:
        last = one.failures[-1]
        times = f"{len(one.failures)} times" if len(one.failures) > 1 else "once"
        notes.append(f"died {times} after it: {last.error_type} at step {last.step} on rank {last.rank}")
    return notes
