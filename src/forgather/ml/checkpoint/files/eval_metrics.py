"""Evaluation metrics of a checkpoint, in the file `eval_metrics.json`.

Users edit this file, so its size and checksum are not verified. It must still be valid JSON.
"""

import os
from collections.abc import Mapping

from forgather.ml.checkpoint.encoding import strict_json
from forgather.ml.checkpoint.errors import CheckpointCorruptError
from forgather.ml.checkpoint.files.regular_files import read_small_file

__all__ = ["EVAL_METRICS_NAME", "load_checkpoint_metrics", "metrics_bytes"]

EVAL_METRICS_NAME = "eval_metrics.json"


def metrics_bytes(metrics: Mapping[str, object]) -> bytes:
    """Return the content of a metrics file; tensors and NumPy scalars become numbers."""
    plain = {key: value.item() if hasattr(value, "item") else value for key, value in metrics.items()}
    return strict_json.dumps(plain, EVAL_METRICS_NAME)


def load_checkpoint_metrics(checkpoint_path: str) -> dict[str, float] | None:
    """Return the evaluation metrics of a checkpoint, or None if no evaluation ran for it."""
    path = os.path.join(checkpoint_path, EVAL_METRICS_NAME)
    try:
        loaded = strict_json.loads(read_small_file(path), path)
    except FileNotFoundError:
        return None
    if type(loaded) is not dict:
        raise CheckpointCorruptError(f"{path} is damaged: it must be a JSON object of metrics by name")
    metrics: dict[str, float] = loaded
    return metrics
