"""CheckpointManager: checkpoint paths, saving, retention, and choice of the checkpoint to resume from.

Facade of `forgather.ml.checkpoint.manager`.
"""

from forgather.ml.checkpoint.manager import (
    CheckpointConfig,
    CheckpointManager,
    RNGState,
)

__all__ = [
    "CheckpointConfig",
    "CheckpointManager",
    "RNGState",
]
