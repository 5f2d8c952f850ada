"""Mark of a preemption: the file `preempted` in the output directory says that a stop signal ended the run early.

Batch scripts read it, because the exit code of a preemption is 0, as of a complete run. Rank 0 writes it after the save
and removes it when training starts again. Ctrl-C and `forgather control stop` leave no mark: a person stopped the run.
"""

import json
import logging
import os
import signal

from forgather.ml.checkpoint.files.durable import remove_or_warn, replace_file
from forgather.ml.trainer.loop.signals import CONTROL_STOP, Preempted

logger = logging.getLogger(__name__)

FILE_NAME = "preempted"


def leave_mark(output_dir: str, preempted: Preempted) -> None:
    """Write the mark: a JSON object with `signal`, `step` and `checkpoint`. Call this on rank 0."""
    if preempted.signal_name in (signal.SIGINT.name, CONTROL_STOP):
        return
    path = os.path.join(output_dir, FILE_NAME)
    found = {
        "signal": preempted.signal_name,
        "step": preempted.step,
        "checkpoint": preempted.checkpoint_path or None,
    }
    try:
        replace_file(path, (json.dumps(found) + "\n").encode())
    except OSError as error:
        # The checkpoint is saved, and the other ranks leave in order. An error would hide both.
        logger.warning("%s could not be written (%s). The run is not complete: start it again.", path, error)


def remove_mark(output_dir: str) -> None:
    """Remove the mark of an earlier preemption, if there is one. Call this on rank 0."""
    remove_or_warn(os.path.join(output_dir, FILE_NAME))
