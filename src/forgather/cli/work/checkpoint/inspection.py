"""Work of `forgather checkpoint inspect`: the contents of one checkpoint."""

import argparse
import dataclasses
import math
from collections.abc import Mapping, Sequence

from forgather.cli.command_line import DONE
from forgather.cli.output import format_bytes, print_json, show_table
from forgather.cli.work.checkpoint.listing import shown_metrics
from forgather.cli.work.checkpoint.shared import shortened, usage_errors
from forgather.ml.trainer.callbacks.display import format_count, get_console, show_row
from forgather.tools.checkpoints.inspection import CheckpointDetails, ComponentDetails, inspect_checkpoint

_SHOWN_SETTINGS = (
    "model.model_type",
    "model.pretrained",
    "model.class_path",
    "trainer.kind",
    "args.learning_rate",
    "args.per_device_train_batch_size",
    "args.gradient_accumulation_steps",
    "args.max_steps",
    "args.seed",
)


def run(options: argparse.Namespace) -> int:
    """Describe the checkpoint; returns the exit code."""
    with usage_errors():
        details = inspect_checkpoint(options.path, options.tensors)
    if options.json:
        print_json("checkpoint.inspect/1", dataclasses.asdict(details))
    else:
        _show(details)
    return DONE


def _show(details: CheckpointDetails) -> None:
    summary = details.summary
    show_row("checkpoint", details.path)
    show_row("step", f"{summary.step}, written {summary.time}")
    show_row("trainer", f"{summary.trainer or 'unknown'}, {_topology(details)}")
    show_row("versions", f"forgather {details.forgather_version}, torch {details.pytorch_version}")
    show_row("metrics", shown_metrics(summary.metrics))
    show_row("weights", None if details.weights == "included" else details.weights)
    show_row("settings", _settings(details.settings))
    for name, value in details.notes.items():
        show_row(name, shortened(value, 200))
    get_console().print()
    columns = ("component", "pattern", "size", "written by ranks", "files")
    show_table(columns, [_component_row(one) for one in details.components], numeric=("size",))
    if details.tensors is not None:
        _show_tensors(details)


def _topology(details: CheckpointDetails) -> str:
    ranks = details.summary.world_size or 1
    text = f"{ranks} rank{'s' if ranks > 1 else ''}"
    text += f" on {details.num_nodes} nodes" if details.num_nodes > 1 else ""
    if details.mesh:
        names, shape = details.mesh.get("axis_names"), details.mesh.get("shape")
        text += f", mesh {names} {shape}"
    return text


def _settings(settings: Mapping[str, object] | None) -> str | None:
    if settings is None:
        return None
    shown = [f"{name}={settings[name]}" for name in _SHOWN_SETTINGS if settings.get(name) is not None]
    return shortened(", ".join(shown), 400)


def _component_row(one: ComponentDetails) -> tuple[object, ...]:
    pattern = one.pattern if one.group is None else f"{one.pattern} ({one.group})"
    return one.key, pattern, format_bytes(one.size_bytes), _ranks(one.writer_ranks), _files(one)


def _files(one: ComponentDetails) -> str:
    names = [file.path for file in one.files]
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text; a range without gaps as `0-7`."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))


def _show_tensors(details: CheckpointDetails) -> None:
    tensors = details.tensors or ()
    get_console().print()
    rows = [
        (one.component, one.name, list(one.shape), one.dtype, format_bytes(one.size_bytes), one.file) for one in tensors
    ]
    show_table(("component", "tensor", "shape", "dtype", "size", "file"), rows, numeric=("size",))
    weights = [one for one in tensors if one.component == "model"]
    count = sum(math.prod(one.shape) for one in weights)
    show_row("total", f"{len(tensors)} tensors; weights: {len(weights)} tensors, {format_count(count)} values")
