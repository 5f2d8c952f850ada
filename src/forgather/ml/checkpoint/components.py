"""How a trainer declares its state: named components, and how ranks share each of them."""

import re
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, runtime_checkable

from forgather._suggestions import did_you_mean
from forgather.ml.checkpoint.encoding.digest import compute_state_hash
from forgather.ml.checkpoint.manifest import CheckpointManifest, ComponentManifest
from forgather.ml.checkpoint.replicas import ValidationLevel

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


class SharingPattern(Enum):
    """How a component is spread over ranks; who writes and who reads follows from it."""

    GLOBAL = "global"
    """One copy exists for the whole job: rank 0 writes it, every rank reads it."""
    PER_RANK = "per_rank"
    """Every rank has its own."""
    REPLICATED = "replicated"
    """Every rank has an identical copy: one rank writes it, every rank reads it."""
    PER_GROUP = "per_group"
    """Identical inside each process group of a named family, different between the groups."""
    PER_NODE = "per_node"
    """One copy per node: its local rank 0 writes it, the ranks of that node read it."""


@runtime_checkable
class Stateful(Protocol):
    """Anything whose state can be taken and given back.

    Optional methods say how the state moves to another topology. For state that is keyed by parameter name:
    `merge_state_dicts(parts)` makes one state of those of several ranks, `missing_names(state)` tells what this rank
    needs and a state does not have, `add_tied_names(state, sharing)` lets tied parameters be found under each other's
    names. And `init_new_rank(rank, step)` starts a rank that the checkpoint has no state for.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


# Keys and families become parts of file names.
_FILE_NAME_PART = re.compile(r"[A-Za-z0-9][\w.-]*")
_RESERVED_KEYS = ("metadata",)
_VALIDATED_PATTERNS = (SharingPattern.REPLICATED, SharingPattern.PER_GROUP)


@dataclass
class StateComponent:
    """One named piece of training state."""

    key: str
    stateful: Any
    sharing_pattern: SharingPattern
    process_group_name: str | None = None
    """PER_GROUP: the family of groups **whose members hold identical copies**."""
    required: bool = True
    """A required component that is missing in a checkpoint is an error; an optional one starts fresh."""
    validate_replication: bool = False
    """Compare the copies at every save."""
    validation_level: str = "tensor"
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_file_name_part("The component key", self.key)
        if self.key in _RESERVED_KEYS:
            raise ValueError(
                f"The component key {self.key!r} is reserved: the manifest lists files that belong to no component under it. "
                "Choose another."
            )
        if self.process_group_name is not None:
            _check_file_name_part(f"Component {self.key!r}: process_group_name", self.process_group_name)
        if self.sharing_pattern is SharingPattern.PER_GROUP and not self.process_group_name:
            raise ValueError(
                f"Component {self.key!r}: a PER_GROUP component must specify process_group_name, the family of "
                "groups whose members hold identical copies of it (a key of get_process_groups())."
            )
        if self.validate_replication and self.sharing_pattern not in _VALIDATED_PATTERNS:
            raise ValueError(
                f"Component {self.key!r}: validate_replication=True needs the REPLICATED pattern (or PER_GROUP), "
                f"but its pattern is {self.sharing_pattern.name}, which has no copies to compare."
            )
        levels = [level.value for level in ValidationLevel]
        self.validation_level = getattr(self.validation_level, "value", self.validation_level)
        if self.validation_level not in levels:
            raise ValueError(
                f"Component {self.key!r}: validation_level={self.validation_level!r} is not one of {', '.join(levels)}."
            )


def _check_file_name_part(what: str, name: Any) -> None:
    if not isinstance(name, str) or not _FILE_NAME_PART.fullmatch(name):
        raise ValueError(
            f"{what} {name!r} cannot be used: it becomes part of file names, so it must begin with a letter or digit and "
            "hold only letters, digits, '_', '-' and '.'."
        )


def select_components(
    components: Sequence[StateComponent], keys: Collection[str] | None, setting: str = "checkpoint_components"
) -> list[StateComponent]:
    """The components that `keys` names; all of them for None."""
    if keys is None:
        return list(components)
    if isinstance(keys, str):
        raise ValueError(f"{setting}={keys!r} must be a list of component names, not one string.")
    require_known_components([component.key for component in components], keys, setting)
    return [component for component in components if component.key in keys]


def require_known_components(known: Sequence[str], keys: Collection[str], setting: str) -> None:
    """Raise `ValueError` for a key that no component has."""
    for key in keys:
        if key not in known:
            raise ValueError(
                f"{setting} names the unknown component {key!r}; there are: {', '.join(known)}."
                f"{did_you_mean(str(key), known)}"
            )


def declared_components(provider: Any, model: Any, purpose: str = "save") -> list[StateComponent]:
    """What a trainer declares, by `get_active_state_components`, `get_state_components`, or the older dictionaries."""
    for method in ("get_active_state_components", "get_state_components"):
        declared = getattr(provider, method)() if hasattr(provider, method) else None
        if declared is not None:
            return list(declared)
    older = getattr(provider, f"get_statefuls_for_{purpose}", None)
    if older is None:
        raise ValueError(
            f"{type(provider).__name__} declares no state: implement get_state_components() -> list[StateComponent]."
        )
    warnings.warn(
        f"{type(provider).__name__} declares its state by get_statefuls_for_{purpose}(); all of it is taken as GLOBAL. "
        "Implement get_state_components() and give each component its SharingPattern instead.",
        DeprecationWarning,
        stacklevel=3,
    )
    components = [StateComponent(key, stateful, SharingPattern.GLOBAL) for key, stateful in older().items()]
    if model is not None and all(component.key != "model" for component in components):
        components.insert(0, StateComponent("model", model, SharingPattern.GLOBAL))
    return components


def declared_process_groups(provider: Any) -> dict[str, Any]:
    """The families of groups that a trainer's PER_GROUP components name."""
    return dict(provider.get_process_groups()) if hasattr(provider, "get_process_groups") else {}
