"""Public API for checkpoints: declare state, save it in one atomic transaction, load, verify and retain it.

It works without a trainer: return `StateComponent`s from `get_state_components()`, pass that object to a
`CheckpointManager`, and call `save_checkpoint` and `load_checkpoint` on every rank (see `examples/own_loop.py`).
`CheckpointCoordinator` is the layer below the manager, without retention, lock or resume.
`forgather.ml.sharded_checkpoint` has helpers for weight files.
"""

from typing import TYPE_CHECKING

from forgather._lazy import lazily

if TYPE_CHECKING:
    from forgather.ml.checkpoint.components import SharingPattern, StateComponent, StateDict, Stateful
    from forgather.ml.checkpoint.coordinator import CheckpointCoordinator
    from forgather.ml.checkpoint.encoding.digest import compute_state_hash
    from forgather.ml.checkpoint.errors import (
        CheckpointCorruptError,
        CheckpointError,
        CheckpointLoadError,
        CheckpointNotFoundError,
        CheckpointSaveError,
        CheckpointVersionError,
        OutputDirLockedError,
        ReplicationError,
        StateDecodingError,
        StateEncodingError,
    )
    from forgather.ml.checkpoint.files.eval_metrics import load_checkpoint_metrics
    from forgather.ml.checkpoint.manager import CheckpointConfig, CheckpointManager
    from forgather.ml.checkpoint.manifest import CheckpointManifest, ComponentManifest, read_manifest
    from forgather.ml.checkpoint.replicas import ValidationLevel, validate_replication
    from forgather.ml.checkpoint.retention import AnyOf, BestN, CheckpointInfo, EveryNSteps, LatestN, RetentionPolicy
    from forgather.ml.checkpoint.state.optimizer_state import OptimizerState
    from forgather.ml.checkpoint.state.rng import RNGState
    from forgather.ml.checkpoint.state.state_classes import register_state_class
    from forgather.ml.checkpoint.store import (
        FoundCheckpoint,
        checkpoint_path,
        find_checkpoints,
        open_checkpoint,
        step_of,
        verify_checkpoint,
    )

# Each name is imported on first use, so that `import forgather.ml.checkpoint` does not import torch.
_HOMES = {
    "AnyOf": "retention",
    "BestN": "retention",
    "CheckpointConfig": "storage",
    "CheckpointCoordinator": "coordinator",
    "CheckpointCorruptError": "errors",
    "CheckpointError": "errors",
    "CheckpointInfo": "retention",
    "CheckpointLoadError": "errors",
    "CheckpointManager": "manager",
    "CheckpointManifest": "manifest",
    "CheckpointNotFoundError": "errors",
    "CheckpointSaveError": "errors",
    "CheckpointVersionError": "errors",
    "ComponentManifest": "manifest",
    "EveryNSteps": "retention",
    "FoundCheckpoint": "store",
    "LatestN": "retention",
    "OptimizerState": "state.optimizer_state",
    "OutputDirLockedError": "errors",
    "RNGState": "state.rng",
    "ReplicationError": "errors",
    "RetentionPolicy": "retention",
    "SharingPattern": "components",
    "StateComponent": "components",
    "StateDecodingError": "errors",
    "StateDict": "components",
    "StateEncodingError": "errors",
    "Stateful": "components",
    "ValidationLevel": "replicas",
    "checkpoint_path": "store",
    "compute_state_hash": "encoding.digest",
    "find_checkpoints": "store",
    "load_checkpoint_metrics": "files.eval_metrics",
    "open_checkpoint": "store",
    "read_manifest": "manifest",
    "register_state_class": "state.state_classes",
    "step_of": "store",
    "validate_replication": "replicas",
    "verify_checkpoint": "store",
}

__all__ = [
    "AnyOf",
    "BestN",
    "CheckpointConfig",
    "CheckpointCoordinator",
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointInfo",
    "CheckpointLoadError",
    "CheckpointManager",
    "CheckpointManifest",
    "CheckpointNotFoundError",
    "CheckpointSaveError",
    "CheckpointVersionError",
    "ComponentManifest",
    "EveryNSteps",
    "FoundCheckpoint",
    "LatestN",
    "OptimizerState",
    "OutputDirLockedError",
    "RNGState",
    "ReplicationError",
    "RetentionPolicy",
    "SharingPattern",
    "StateComponent",
    "StateDecodingError",
    "StateDict",
    "StateEncodingError",
    "Stateful",
    "ValidationLevel",
    "checkpoint_path",
    "compute_state_hash",
    "find_checkpoints",
    "load_checkpoint_metrics",
    "open_checkpoint",
    "read_manifest",
    "register_state_class",
    "step_of",
    "validate_replication",
    "verify_checkpoint",
]


__getattr__ = lazily(__name__, _HOMES)
