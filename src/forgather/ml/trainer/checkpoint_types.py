"""Types of declared checkpoint state: state components, sharing patterns and manifests.

Facade of `forgather.ml.checkpoint.components`.
"""

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
