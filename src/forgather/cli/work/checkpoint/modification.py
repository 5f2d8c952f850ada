"""Work of `forgather checkpoint modify`: writes the changed copy and says what it changes for a resumed run."""

import argparse
import dataclasses
import os

from forgather.cli.command_line import DONE
from forgather.cli.output import byte_progress, format_bytes, print_json, show_table
from forgather.cli.work.checkpoint.shared import shortened, usage_errors
from forgather.ml.trainer.callbacks.display import get_console, show_row
from forgather.tools.checkpoints.edits import ModificationError
from forgather.tools.checkpoints.modification import Modification, modify_checkpoint
from forgather.tools.checkpoints.paths import find_checkpoint
from forgather.tools.checkpoints.verification import bytes_to_verify


def run(options: argparse.Namespace) -> int:
    """Modify the checkpoint; returns the exit code."""
    with usage_errors(ModificationError):
        total = bytes_to_verify([find_checkpoint(options.path)])
        with byte_progress("verifying", total) as advance:
            result = modify_checkpoint(
                options.path,
                options.output,
                settings=[_pair(word) for word in options.set],
                scales=[_pair(word) for word in options.scale],
                drops=options.drop,
                note_bytes=advance,
            )
    if options.json:
        print_json("checkpoint.modify/1", dataclasses.asdict(result))
    else:
        _show(result)
    return DONE


def _pair(word: str) -> tuple[str, str]:
    key, _, value = word.partition("=")
    return key, value


def _show(result: Modification) -> None:
    show_row("original", f"{result.source} (unchanged)")
    show_row("saved", result.path)
    sizes = {"written": result.written_bytes, "copied": result.copied_bytes, "hard links": result.linked_bytes}
    show_row("files", ", ".join(f"{format_bytes(size)} {name}" for name, size in sizes.items() if size))
    get_console().print()
    rows = [(one.key, shortened(one.before, 40), shortened(one.after, 40), one.effect) for one in result.changes]
    show_table(("changed", "before", "after", "effect"), rows)
    get_console().print()
    if result.is_auto_resumed:
        show_row("resume", "the run continues from it: it is now the newest checkpoint of its output directory")
    else:
        show_row("resume", f"only on request: forgather train CONFIG --args.resume_from_checkpoint {result.path}")
    configuration = os.path.join(result.path, "config.yaml")
    if any(one.key.startswith("args.") for one in result.changes):
        show_row("", f"with the changed settings: forgather train {configuration}")
