"""State components, sharing patterns and manifests: how a trainer declares its state."""

from forgather.ml.checkpoint.components import (
    CheckpointManifest,
    ComponentManifest,
    SharingPattern,
    StateComponent,
    Stateful,
    compute_state_hash,
    declared_components,
    declared_process_groups,
    select_components,
)

__all__ = [
    "CheckpointManifest",
    "ComponentManifest",
    "SharingPattern",
    "StateComponent",
    "Stateful",
    "compute_state_hash",
    "declared_components",
    "declared_process_groups",
    "select_components",
]
