"""Work of `forgather checkpoint export`: the model of a checkpoint as a plain Hugging Face directory."""

import argparse
import os

from forgather.cli.command_line import DONE
from forgather.cli.output import format_bytes, print_json
from forgather.cli.work.checkpoint.shared import usage_errors
from forgather.cli.work.finalize import as_plain_data
from forgather.ml.checkpoint.foreign.ownership import require_own
from forgather.ml.finalize import check_output, finalize
from forgather.ml.trainer.callbacks.display import show_row
from forgather.tools.checkpoints.paths import find_checkpoint


def run(options: argparse.Namespace) -> int:
    """Export the model; returns the exit code."""
    with usage_errors(FileExistsError):
        checkpoint = find_checkpoint(options.path)
        require_own(checkpoint)
        check_output(options.output, checkpoint)
    report = finalize(checkpoint, options.output, ema=options.ema)
    has_config = os.path.exists(os.path.join(options.output, "config.json"))
    if options.json:
        keys = ("checkpoint", "step", "output", "averaged", "bytes_after")
        data = as_plain_data(report)
        print_json("checkpoint.export/1", {**{key: data[key] for key in keys}, "loads_with_transformers": has_config})
        return DONE
    show_row("checkpoint", report.checkpoint + (", averaged weights" if report.averaged else ""))
    show_row("saved", f"{report.output} ({format_bytes(report.bytes_after)} of weights)")
    if not has_config:
        show_row(
            "", "The model is not of transformers, so there is no config.json: load the weights into your own class."
        )
    return DONE
