"""Checkpoints of transformers in the output directory, for `train(resume_from_checkpoint=True)`.

A script that changes its import may have checkpoints of transformers. They are imported if there is no checkpoint of
Forgather, and never changed. The engine calls it before the checkpoint of a run is resolved.
"""

import logging

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.files.layout import IN_OUTPUT_DIR, LAYOUTS, checkpoints_root, counts_any_name
from forgather.ml.checkpoint.foreign.ownership import Owner

logger = logging.getLogger(__name__)


def newest_of_transformers(output_dir: str) -> str | None:
    """Return the newest checkpoint of transformers; None without one, or if Forgather has a checkpoint there."""
    roots = [(layout, checkpoints_root(output_dir, layout)) for layout in LAYOUTS]
    if any(store.find_checkpoints(root, counts_any_name(layout)) for layout, root in roots):
        return None
    others = store.checkpoints_of_others(checkpoints_root(output_dir, IN_OUTPUT_DIR))
    paths = [path for path, owner in others if owner is Owner.TRANSFORMERS]
    if not paths:
        return None
    logger.warning("Resuming from %s, which transformers has written. It is imported and stays unchanged.", paths[-1])
    return paths[-1]
