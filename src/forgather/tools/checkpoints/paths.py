"""Choice of the checkpoint that a path means: the checkpoint itself, or the newest complete one of a run."""

import os

from forgather.ml.checkpoint.errors import CheckpointLoadError, CheckpointNotFoundError
from forgather.ml.finalize import resolve_checkpoint
from forgather.tools.checkpoints.listing import list_checkpoints, looks_like_checkpoint


def find_checkpoint(path: str) -> str:
    """Return the checkpoint at a path, complete or not; for a run, its newest complete checkpoint.

    Raise `CheckpointNotFoundError` if there is none, and `CheckpointLoadError` if none is complete.
    """
    if not os.path.isdir(path):
        return resolve_checkpoint(path)
    if looks_like_checkpoint(path):
        return path
    found = list_checkpoints(path).checkpoints
    if not found:
        raise CheckpointNotFoundError(
            f"{path!r} is not a checkpoint and has none: give a directory such as out/checkpoints/checkpoint-100, or the "
            "output directory of a run."
        )
    if not any(one.status == "complete" for one in found):
        raise CheckpointLoadError(
            f"{path} has no complete checkpoint, and {len(found)} incomplete or foreign: forgather checkpoint ls {path} says "
            "why."
        )
    return resolve_checkpoint(path)
