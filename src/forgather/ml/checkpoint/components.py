"""State components: named pieces of training state, each with its sharing pattern between ranks.

The `SharingPattern` alone determines which ranks write and read a component. Trainers and other providers declare
components; the manager collects them at every save and load, and the coordinator validates them.
"""

import logging
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, TypeGuard, runtime_checkable

from torch import nn
from torch.distributed import ProcessGroup

from forgather._suggestions import did_you_mean
from forgather.ml.checkpoint.encoding.digest import compute_state_hash
from forgather.ml.checkpoint.manifest import CheckpointManifest, ComponentManifest
from forgather.ml.checkpoint.replicas import ValidationLevel

__all__ = [
    "CheckpointManifest",
    "ComponentManifest",
    "SharingPattern",
    "StateComponent",
    "StateDict",
    "Stateful",
    "compute_state_hash",
    "declared_components",
    "declared_process_groups",
    "select_components",
]


logger = logging.getLogger(__name__)

MODEL_KEY = "model"

StateDict = dict[str, Any]
"""Return type of `state_dict()`: plain containers, numbers, text and tensors, nested in any way."""


class SharingPattern(Enum):
    """Distribution of a component over ranks; determines the ranks that write it and the ranks that read it."""

    GLOBAL = "global"
    """One copy for the whole job: rank 0 writes it, every rank reads it."""
    PER_RANK = "per_rank"
    """Separate state on every rank: each rank writes and reads its own file."""
    REPLICATED = "replicated"
    """Identical copies on all ranks: one rank writes the state, every rank reads it."""
    PER_GROUP = "per_group"
    """Identical copies within each process group of a named family, different state between the groups."""
    PER_NODE = "per_node"
    """One copy per node: its local rank 0 writes it, the ranks of that node read it."""


@runtime_checkable
class Stateful(Protocol):
    """Object with `state_dict()` and `load_state_dict()`.

    Optional methods let the state move to another topology. For state keyed by parameter name (FQN):
    `merge_state_dicts(parts)` merges the states of several ranks, `missing_names(state)` returns the names that this
    rank needs and `state` lacks, and `add_tied_names(state, sharing)` copies entries to the names of tied parameters.
    `init_new_rank(rank, step)` initialises a rank that has no state in the checkpoint. `check_state_dict(state)` raises
    if the state does not fit, before any component is changed.
    """

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state_dict: StateDict) -> object: ...


# Component keys and names of process groups become parts of file names.
_FILE_NAME_PART = re.compile(r"[A-Za-z0-9][\w.-]*")
# The manifest records files that belong to no component, such as metrics, under this key.
_RESERVED_KEYS = ("metadata",)
_VALIDATED_PATTERNS = (SharingPattern.REPLICATED, SharingPattern.PER_GROUP)


@dataclass
class StateComponent:
    """Declaration of one named piece of training state."""

    key: str
    stateful: Stateful | Sequence[nn.Module] | None
    """Object that holds the state. The key "model" also accepts a list of modules, such as a rank's pipeline stages.
    None skips an optional component."""
    sharing_pattern: SharingPattern
    process_group_name: str | None = None
    """PER_GROUP: name of the group family. **The members of each group hold identical copies.**"""
    required: bool = True
    """If a checkpoint lacks the component, a load raises when it is required; an optional component starts fresh."""
    validate_replication: bool = False
    """Compare the copies at every save."""
    validation_level: str = "tensor"
    metadata: dict[str, object] = field(default_factory=dict)

    @property
    def state_holder(self) -> Stateful:
        """`stateful` narrowed to `Stateful`, for components that passed `usable_components`."""
        assert isinstance(self.stateful, Stateful), f"component {self.key!r} has no state"
        return self.stateful

    def __post_init__(self) -> None:
        _check_file_name_part("The component key", self.key)
        if self.key in _RESERVED_KEYS:
            raise ValueError(
                f"The component key {self.key!r} is reserved for files that belong to no component. Choose another key."
            )
        if self.process_group_name is not None:
            _check_file_name_part(f"Component {self.key!r}: process_group_name", self.process_group_name)
        if self.sharing_pattern is SharingPattern.PER_GROUP and not self.process_group_name:
            raise ValueError(
                f"Component {self.key!r}: a PER_GROUP component must specify process_group_name, a key of "
                "get_process_groups(). The members of each group hold identical copies."
            )
        if self.validate_replication and self.sharing_pattern not in _VALIDATED_PATTERNS:
            raise ValueError(
                f"Component {self.key!r}: validate_replication=True needs the REPLICATED pattern (or PER_GROUP), "
                f"but its pattern is {self.sharing_pattern.name}, which has no copies to compare."
            )
        levels = [level.value for level in ValidationLevel]
        # Accept members of the enum as well as their values.
        self.validation_level = getattr(self.validation_level, "value", self.validation_level)
        if self.validation_level not in levels:
            raise ValueError(
                f"Component {self.key!r}: validation_level={self.validation_level!r} is not one of {', '.join(levels)}."
            )


def _check_file_name_part(what: str, name: object) -> None:
    if not isinstance(name, str) or not _FILE_NAME_PART.fullmatch(name):
        raise ValueError(
            f"{what} {name!r} cannot be used: it becomes part of file names. It must start with a letter or digit and "
            "contain only letters, digits, '_', '-' and '.'."
        )


def select_components(
    components: Sequence[StateComponent], keys: Collection[str] | None, setting: str = "checkpoint_components"
) -> list[StateComponent]:
    """Return the components named in `keys`, or all components for None. Raise `ValueError` for unknown keys."""
    if keys is None:
        return list(components)
    # A string is a collection of one-letter strings, so the check for unknown keys would report its letters.
    if isinstance(keys, str):
        raise ValueError(f"{setting}={keys!r} must be a list of component names, not one string.")
    require_known_components([component.key for component in components], keys, setting)
    return [component for component in components if component.key in keys]


def require_known_components(known: Sequence[str], keys: Collection[str], setting: str) -> None:
    """Raise `ValueError` for a key without a component."""
    for key in keys:
        if key not in known:
            raise ValueError(
                f"{setting} names the unknown component {key!r}. Known components: {', '.join(known)}."
                f"{did_you_mean(str(key), known)}"
            )


def check_declaration(components: Sequence[StateComponent], groups: Mapping[str, ProcessGroup]) -> None:
    """Raise `ValueError` for duplicate component keys and for unknown process groups."""
    _refuse_duplicates(components)
    _refuse_unknown_families(components, groups)


def _refuse_duplicates(components: Sequence[StateComponent]) -> None:
    seen: set[str] = set()
    for component in components:
        if component.key in seen:
            raise ValueError(
                f"Duplicate component key {component.key!r}: keys must be unique, because they become file names."
            )
        seen.add(component.key)


def _refuse_unknown_families(components: Sequence[StateComponent], groups: Mapping[str, ProcessGroup]) -> None:
    for component in components:
        name = component.process_group_name
        if component.sharing_pattern is SharingPattern.PER_GROUP and name not in groups:
            raise ValueError(
                f"Component {component.key!r} is PER_GROUP over the unknown process group {name!r}; "
                f"get_process_groups() has: {', '.join(groups) or 'none'}."
            )


def usable_components(components: Sequence[StateComponent]) -> list[StateComponent]:
    """Return the components that have state. Raise `ValueError` if a required component has none."""
    usable = []
    for component in components:
        problem = _problem_with(component)
        if problem and component.required:
            raise ValueError(
                f"The required component {component.key!r} cannot be saved or loaded: {problem}. Pass an object with "
                "state_dict() and load_state_dict(), remove the component from get_state_components(), or declare it "
                "with required=False."
            )
        # Only at debug level: a provider may list components that this run does not use.
        if problem:
            logger.debug("Component %r is skipped: %s.", component.key, problem)
        else:
            usable.append(component)
    return usable


def _problem_with(component: StateComponent) -> str:
    stateful = component.stateful
    if stateful is None:
        return "its stateful is None"
    if component.key == MODEL_KEY and is_list_of_modules(stateful):
        return ""
    lacking = [name for name in ("state_dict", "load_state_dict") if not callable(getattr(stateful, name, None))]
    return f"its stateful is of type {type(stateful).__name__}, without {' and '.join(lacking)}" if lacking else ""


def is_list_of_modules(stateful: object) -> TypeGuard[Sequence[nn.Module]]:
    """Return whether `stateful` is a list of modules, such as the pipeline stages of one rank."""
    return isinstance(stateful, list | tuple) and all(isinstance(one, nn.Module) for one in stateful)


def declared_components(
    provider: object,
    model: nn.Module | Sequence[nn.Module] | None,
    purpose: str = "save",
    model_pattern: SharingPattern = SharingPattern.GLOBAL,
) -> list[StateComponent]:
    """Return the components that a provider declares, plus the model.

    The provider implements `get_active_state_components`, `get_state_components`, or the deprecated
    `get_statefuls_for_save` and `get_statefuls_for_load`. If it does not declare the `model`, the model is added with
    `model_pattern`, unless the provider declares it but excludes it from its active components.
    """
    components = _newer_declaration(provider)
    if components is None:
        components = _older_declaration(provider, purpose)
    if model is None or any(component.key == MODEL_KEY for component in components) or _leaves_out_model(provider):
        return components
    return [StateComponent(MODEL_KEY, model, model_pattern), *components]


def _newer_declaration(provider: object) -> list[StateComponent] | None:
    # A method may return None to defer to the next one.
    for method in ("get_active_state_components", "get_state_components"):
        declared = getattr(provider, method)() if hasattr(provider, method) else None
        if declared is not None:
            return list(declared)
    return None


def _leaves_out_model(provider: object) -> bool:
    """Return whether the provider declares the model but excludes it from the active components.

    Callers have already found that the active components lack the model (setting `checkpoint_components`).
    """
    # Only a provider with both methods can declare a component and exclude it.
    if not (hasattr(provider, "get_active_state_components") and hasattr(provider, "get_state_components")):
        return False
    return any(component.key == MODEL_KEY for component in provider.get_state_components() or ())


def _older_declaration(provider: object, purpose: str) -> list[StateComponent]:
    """Return components from `get_statefuls_for_save` or `get_statefuls_for_load`, with a DeprecationWarning.

    A provider may implement only one of the two methods; it then serves both purposes.
    """
    # The method for the purpose comes first; False sorts before True.
    methods = sorted(("get_statefuls_for_save", "get_statefuls_for_load"), key=lambda name: not name.endswith(purpose))
    method = next((name for name in methods if hasattr(provider, name)), None)
    if method is None:
        raise ValueError(
            f"{type(provider).__name__} declares no state: implement get_state_components() -> list[StateComponent]."
        )
    warnings.warn(
        f"{type(provider).__name__} declares its state with the deprecated {method}(), so all of it is GLOBAL. "
        "Implement get_state_components() with a SharingPattern for each component instead.",
        DeprecationWarning,
        stacklevel=4,
    )
    statefuls: Mapping[str, Stateful | None] = getattr(provider, method)()
    return [
        # A value of None means that there is no such state, so the component must be optional.
        StateComponent(key, stateful, SharingPattern.GLOBAL, required=stateful is not None)
        for key, stateful in statefuls.items()
    ]


def declared_process_groups(provider: object) -> dict[str, ProcessGroup]:
    """Return the provider's process groups by family name, for its PER_GROUP components."""
    return dict(provider.get_process_groups()) if hasattr(provider, "get_process_groups") else {}


def undeclared_pattern(model_parts: object, num_ranks: int) -> SharingPattern:
    """Return the sharing pattern of a model that the provider does not declare.

    A save compares the tensor names of all ranks, so a wrong guess of REPLICATED raises instead of losing tensors.
    """
    if model_parts is not None:
        return SharingPattern.PER_RANK
    return SharingPattern.GLOBAL if num_ranks == 1 else SharingPattern.REPLICATED
