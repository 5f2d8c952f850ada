"""Weight files of a model: shards, index, sharing metadata, saving and loading by FQN, checkpoint directories.

Facade of modules in `forgather.ml.checkpoint`.
"""

from forgather.ml.checkpoint.files import eval_metrics
from forgather.ml.checkpoint.files.eval_metrics import *  # noqa: F403
from forgather.ml.checkpoint.weights import directories, index, module_weights
from forgather.ml.checkpoint.weights.directories import *  # noqa: F403
from forgather.ml.checkpoint.weights.index import *  # noqa: F403
from forgather.ml.checkpoint.weights.module_weights import *  # noqa: F403

__all__ = sorted({*eval_metrics.__all__, *directories.__all__, *index.__all__, *module_weights.__all__})
