"""Work of `forgather checkpoint diff`: tables of the layers, tensors and values that differ."""

import argparse
import dataclasses
from collections.abc import Sequence

from forgather.cli.command_line import DONE, FAILED
from forgather.cli.output import byte_progress, print_json, show_table
from forgather.cli.work.checkpoint.shared import shortened, shown_number, usage_errors
from forgather.ml.trainer.callbacks.display import get_console, show_row
from forgather.tools.checkpoints.differences import (
    ONLY_IN_A,
    ONLY_IN_B,
    Differences,
    TensorDifference,
    UnknownComponentError,
    ValueDifference,
    bytes_to_compare,
    compare_checkpoints,
)


def run(options: argparse.Namespace) -> int:
    """Compare two checkpoints; returns 1 if they differ."""
    with usage_errors(UnknownComponentError):
        total = bytes_to_compare(options.a, options.b)
        with byte_progress("comparing", total) as advance:
            result = compare_checkpoints(options.a, options.b, options.component, advance)
    if options.json:
        print_json("checkpoint.diff/1", as_plain_data(result))
    else:
        _show(result, options.top)
    return DONE if result.are_equal else FAILED


def as_plain_data(result: Differences) -> dict[str, object]:
    """Return the differences as data that JSON can represent."""
    data = dataclasses.asdict(result)
    for one, difference in zip(data["tensors"], result.tensors, strict=True):
        if difference.change is not None:
            one["change"] |= {"change": difference.change.change, "only_bits": difference.change.only_bits}
    return {"equal": result.are_equal, **data}


def _show(result: Differences, top: int) -> None:
    show_row("A", result.a)
    show_row("B", result.b)
    if result.are_equal:
        show_row("equal", f"{result.num_tensors} tensors (all bits) and {result.num_values} values")
        return
    show_row("different", f"{len(result.tensors)} of {result.num_tensors} tensors, {_values(result)}")
    bits = sum(one.kind == "bits" for one in result.tensors)
    show_row("", f"{bits} tensors differ only in bits: all values are equal" if bits else None)
    _show_layers(result, top)
    _show_tensors(result.tensors, top)
    _show_values(result, top)


def _values(result: Differences) -> str:
    return f"{len(result.values)} of {result.num_values} values"


def _show_layers(result: Differences, top: int) -> None:
    rows = [
        (
            one.component,
            one.layer,
            f"{one.num_different}/{one.num_tensors}",
            shown_number(one.change),
            shown_number(one.max_abs),
        )
        for one in result.layers[:top]
    ]
    columns = ("component", "layer", "tensors", "relative change", "largest difference")
    _table(columns, rows, len(result.layers), numeric=columns[2:])


def _show_tensors(tensors: Sequence[TensorDifference], top: int) -> None:
    columns = ("component", "tensor", "what", "relative change", "largest difference", "largest relative", "elements")
    both = [one for one in tensors if not one.is_missing]
    rows = [(one.component, one.name, _kind(one), *_change(one)) for one in both[:top]]
    _table(columns, rows, len(both), numeric=columns[3:])
    _show_missing("tensors", tensors, top)


def _kind(one: TensorDifference) -> str:
    return f"{one.kind}: {one.detail}" if one.detail else one.kind


def _change(one: TensorDifference) -> tuple[str, ...]:
    change = one.change
    if change is None:
        return "", "", "", str(one.num_elements)
    numbers = (shown_number(number) for number in (change.change, change.max_abs, change.max_rel))
    return (*numbers, f"{change.num_different}/{one.num_elements}")


def _show_values(result: Differences, top: int) -> None:
    both = [one for one in result.values if not one.is_missing]
    rows = [(one.component, one.name, shortened(one.a, 40), shortened(one.b, 40)) for one in both[:top]]
    _table(("component", "value", "A", "B"), rows, len(both))
    _show_missing("values", result.values, top)


def _show_missing(what: str, differences: Sequence[TensorDifference | ValueDifference], top: int) -> None:
    """Print the names that only one of the checkpoints has."""
    for kind in (ONLY_IN_A, ONLY_IN_B):
        names = [f"{one.component} {one.name}" for one in differences if one.kind == kind]
        if names:
            get_console().print()
            more = f" and {len(names) - top} more" if len(names) > top else ""
            show_row(kind, f"{len(names)} {what}: {', '.join(names[:top])}{more}")


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]], count: int, numeric: Sequence[str] = ()) -> None:
    if not rows:
        return
    get_console().print()
    show_table(columns, rows, numeric=numeric)
    if count > len(rows):
        show_row("", f"{count - len(rows)} more; --top {count} shows all")
