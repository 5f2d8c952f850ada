"""CheckpointManager: when and where to save, what to keep, what to resume from."""

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
