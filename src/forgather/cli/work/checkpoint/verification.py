"""Work of `forgather checkpoint verify`: every file against its checksum, with progress."""

import argparse
import dataclasses

from forgather.cli.command_line import DONE, FAILED
from forgather.cli.errors import UsageError
from forgather.cli.output import byte_progress, format_bytes, print_json
from forgather.cli.work.checkpoint.shared import usage_errors
from forgather.ml.trainer.callbacks.display import show_row
from forgather.tools.checkpoints.verification import (
    CheckpointVerdict,
    Verification,
    bytes_to_verify,
    checkpoints_to_verify,
    verify_checkpoints,
)

_MOST_CHOICES = 3
"""Choices of a checkpoint, if the run deletes the chosen one."""


def run(options: argparse.Namespace) -> int:
    """Verify one checkpoint or all of a run; returns 1 if something is wrong."""
    for _ in range(_MOST_CHOICES):
        with usage_errors():
            paths = checkpoints_to_verify(options.path, options.all)
        with byte_progress("verifying", bytes_to_verify(paths)) as advance:
            result = verify_checkpoints(paths, advance)
        wanted = paths if options.all else paths[:1]
        if not set(wanted) <= set(result.gone):
            break
    else:
        raise UsageError(
            f"{options.path}: the run deletes its checkpoints faster than they are verified ({result.gone[0]} is gone). Keep "
            "more of them (save_total_limit), or verify a copy."
        )
    if options.json:
        print_json("checkpoint.verify/1", as_plain_data(result))
    else:
        _show(result)
    return DONE if result.is_intact else FAILED


def as_plain_data(result: Verification) -> dict[str, object]:
    """Return a verification as data that JSON can represent."""
    return {"intact": result.is_intact, "gb_per_second": _speed(result), **dataclasses.asdict(result)}


def _speed(result: Verification) -> float:
    return result.num_bytes / 1e9 / max(result.seconds, 1e-9)


def _show(result: Verification) -> None:
    for verdict in result.checkpoints:
        _show_verdict(verdict)
    for path in result.gone:
        show_row("gone", f"{path} (deleted by its run meanwhile)")
    show_row("read", f"{format_bytes(result.num_bytes)} in {result.seconds:.2f} s, {_speed(result):.2f} GB/s")


def _show_verdict(verdict: CheckpointVerdict) -> None:
    if not verdict.problems:
        show_row("intact", f"{verdict.path} ({verdict.num_files} files, {format_bytes(verdict.size_bytes)})")
        for name in verdict.missing_optional:
            show_row("", f"{name} is missing; a resume starts this part fresh")
        return
    show_row("DAMAGED", verdict.path)
    for problem in verdict.problems:
        show_row("", problem)
