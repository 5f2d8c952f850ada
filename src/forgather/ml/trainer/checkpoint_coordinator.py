"""CheckpointCoordinator: saves and loads declared state across ranks.

Facade of `forgather.ml.checkpoint.coordinator`.
"""

from forgather.ml.checkpoint.coordinator import (
    CheckpointCoordinator,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointLoadError,
    CheckpointSaveError,
    CheckpointVersionError,
    OutputDirLockedError,
    ReplicationError,
    StateDecodingError,
    StateEncodingError,
)

__all__ = [
    "CheckpointCoordinator",
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointLoadError",
    "CheckpointSaveError",
    "CheckpointVersionError",
    "OutputDirLockedError",
    "ReplicationError",
    "StateDecodingError",
    "StateEncodingError",
]
