"""Notes of workers for their launcher: progress of each rank, and whether a stop signal ended the run.

The launcher creates a folder and names it in an environment variable; workers write small files into it. The launcher
reads them after a worker has died without a Python error, and when workers have exited. Imports no torch.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NOTES_VARIABLE = "FORGATHER_RUN_NOTES"
_PREEMPTED = "preempted"


def use_folder(folder: str) -> None:
    """Let the workers that this launcher starts write their notes into `folder`."""
    os.environ[NOTES_VARIABLE] = folder


def notes_folder() -> Path | None:
    text = os.environ.get(NOTES_VARIABLE)
    return None if text is None else Path(text)


def note_preempted() -> None:
    """Record in a worker that a stop signal ended the run, so that exit code 0 does not mean that it is complete."""
    folder = notes_folder()
    if folder is not None:
        (folder / _PREEMPTED).touch()


def was_preempted() -> bool:
    """Return whether the workers of this launcher were stopped by a signal; forget it for the next workers."""
    folder = notes_folder()
    if folder is None or not is_preempted():
        return False
    (folder / _PREEMPTED).unlink()
    return True


def is_preempted() -> bool:
    """Return whether a worker of this node has recorded a stop signal."""
    folder = notes_folder()
    return folder is not None and (folder / _PREEMPTED).exists()


def read_progress(local_rank: int) -> Mapping[str, Any]:
    """Return the progress that a worker noted: step, attempt and checkpoint; empty if it noted none."""
    folder = notes_folder()
    if folder is None:
        return {}
    try:
        content: object = json.loads((folder / f"progress-{local_rank}.json").read_bytes().rstrip(b"\0"))
    except (OSError, ValueError):
        # The worker died before training, or while it wrote.
        return {}
    return content if isinstance(content, dict) else {}
