"""Layouts of an output directory: `checkpoints/checkpoint-N` as Forgather's default, or `checkpoint-N` as transformers.

All checkpoints of a run are in one of the two places. Forgather's checkpoints in the other place raise an error, because
a resume would miss them. The store, the manager and every command ask here for the folder of checkpoints.
"""

import os

from forgather.ml.checkpoint.errors import CheckpointError
from forgather.ml.checkpoint.foreign.ownership import is_ours

CHECKPOINTS_FOLDER = "checkpoints"
IN_FOLDER, IN_OUTPUT_DIR = "checkpoints", "output_dir"
LAYOUTS = (IN_FOLDER, IN_OUTPUT_DIR)
CHECKPOINT_PREFIX = "checkpoint-"
TRAINER_STATE_NAME = "trainer_state.json"
"""File in the format of transformers, written with IN_OUTPUT_DIR. Forgather never reads it from its own checkpoints."""


def checkpoints_root(output_dir: str, layout: str = IN_FOLDER) -> str:
    """Return the folder of checkpoints of an output directory."""
    if layout not in LAYOUTS:
        raise ValueError(f"checkpoint_layout={layout!r} is not one of {', '.join(map(repr, LAYOUTS))}.")
    return output_dir if layout == IN_OUTPUT_DIR else os.path.join(output_dir, CHECKPOINTS_FOLDER)


def counts_any_name(layout: str) -> bool:
    """Return whether every directory with a manifest counts as a checkpoint of the run.

    An output directory also has directories that users saved by hand, which retention must not delete.
    """
    return layout == IN_FOLDER


def own_checkpoints(root: str) -> list[str]:
    """Return the names `checkpoint-...` in a folder that are Forgather's checkpoints."""
    names = sorted(os.listdir(root)) if os.path.isdir(root) else []
    return [name for name in names if name.startswith(CHECKPOINT_PREFIX) and is_ours(os.path.join(root, name))]


def layout_of(output_dir: str) -> str:
    """Return the layout of an existing run, IN_FOLDER if it has no checkpoints. Raise if both places have some."""
    if not own_checkpoints(checkpoints_root(output_dir, IN_OUTPUT_DIR)):
        return IN_FOLDER
    refuse_other_place(output_dir, IN_OUTPUT_DIR)
    return IN_OUTPUT_DIR


def refuse_other_place(output_dir: str, layout: str) -> None:
    """Raise `CheckpointError` if the folder of the other layout has checkpoints of Forgather."""
    other = next(one for one in LAYOUTS if one != layout)
    root, other_root = checkpoints_root(output_dir, layout), checkpoints_root(output_dir, other)
    found = own_checkpoints(other_root)
    if not found:
        return
    here = own_checkpoints(root)
    raise CheckpointError(
        f"The output directory {output_dir!r} has Forgather checkpoints in another layout: "
        f"{os.path.join(other_root, found[-1])} belongs to checkpoint_layout={other!r}, but checkpoint_layout={layout!r} "
        f"uses {os.path.join(root, 'checkpoint-<step>')} ({f'which has {here[-1]}' if here else 'which has none'}). A run "
        f"keeps its checkpoints in one place, because a resume would miss the others. Set checkpoint_layout={other!r}, "
        f"move the checkpoints of one place ({', '.join(found[-3:])}) to the other, or choose another output_dir."
    )
