"""State components: named pieces of training state, and how ranks share each of them."""

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
"""What `state_dict()` returns: plain containers, numbers, text and tensors, nested in any way."""


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

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state_dict: StateDict) -> object: ...


# Keys and families become parts of file names.
_FILE_NAME_PART = re.compile(r"[A-Za-z0-9][\w.-]*")
_RESERVED_KEYS = ("metadata",)
_VALIDATED_PATTERNS = (SharingPattern.REPLICATED, SharingPattern.PER_GROUP)


@dataclass
class StateComponent:
    """One named piece of training state."""

    key: str
    stateful: Stateful | Sequence[nn.Module] | None
    """The object with the state. For "model" also a list of modules, such as a rank's pipeline stages. None leaves an
    optional component out."""
    sharing_pattern: SharingPattern
    process_group_name: str | None = None
    """PER_GROUP: the family of groups **whose members hold identical copies**."""
    required: bool = True
    """A required component that is missing in a checkpoint is an error; an optional one starts fresh."""
    validate_replication: bool = False
    """Compare the copies at every save."""
    validation_level: str = "tensor"
    metadata: dict[str, object] = field(default_factory=dict)

    @property
    def state_holder(self) -> Stateful:
        """The stateful, of a component that `usable_components` has kept."""
        assert isinstance(self.stateful, Stateful), f"component {self.key!r} has no state"
        return self.stateful

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


def _check_file_name_part(what: str, name: object) -> None:
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


def check_declaration(components: Sequence[StateComponent], groups: Mapping[str, ProcessGroup]) -> None:
    """Raise `ValueError` for two components with one key, or a process group that does not exist."""
    _refuse_duplicates(components)
    _refuse_unknown_families(components, groups)


def _refuse_duplicates(components: Sequence[StateComponent]) -> None:
    seen: set[str] = set()
    for component in components:
        if component.key in seen:
            raise ValueError(
                f"Duplicate component key {component.key!r}: each component needs a name of its own, since it names files."
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
    """Leave out optional components without state; a required one without state is a `ValueError`."""
    usable = []
    for component in components:
        problem = _problem_with(component)
        if problem and component.required:
            raise ValueError(
                f"The required component {component.key!r} can be neither saved nor loaded: {problem}. Give it an object with "
                "state_dict() and load_state_dict(), leave it out of get_state_components(), or declare it with "
                "required=False."
            )
        if problem:
            logger.debug("Component %r is left out: %s.", component.key, problem)
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
    """Whether a component `model` is given as several modules, such as the stages that a rank has."""
    return isinstance(stateful, list | tuple) and all(isinstance(one, nn.Module) for one in stateful)


def declared_components(
    provider: object,
    model: nn.Module | Sequence[nn.Module] | None,
    purpose: str = "save",
    model_pattern: SharingPattern = SharingPattern.GLOBAL,
) -> list[StateComponent]:
    """What a provider declares, by `get_active_state_components`, `get_state_components`, or the older dictionaries.

    A `model` that the provider does not declare is added with `model_pattern`, unless the provider left it out of its
    active components on purpose.
    """
    components = _newer_declaration(provider)
    if components is None:
        components = _older_declaration(provider, purpose)
    if model is None or any(component.key == MODEL_KEY for component in components) or _leaves_out_model(provider):
        return components
    return [StateComponent(MODEL_KEY, model, model_pattern), *components]


def _newer_declaration(provider: object) -> list[StateComponent] | None:
    for method in ("get_active_state_components", "get_state_components"):
        declared = getattr(provider, method)() if hasattr(provider, method) else None
        if declared is not None:
            return list(declared)
    return None


def _leaves_out_model(provider: object) -> bool:
    """Whether the model is declared, but not active (`checkpoint_components`)."""
    if not (hasattr(provider, "get_active_state_components") and hasattr(provider, "get_state_components")):
        return False
    return any(component.key == MODEL_KEY for component in provider.get_state_components() or ())


def _older_declaration(provider: object, purpose: str) -> list[StateComponent]:
    """`get_statefuls_for_save` and `get_statefuls_for_load`; a provider may have only one of them."""
    methods = sorted(("get_statefuls_for_save", "get_statefuls_for_load"), key=lambda name: not name.endswith(purpose))
    method = next((name for name in methods if hasattr(provider, name)), None)
    if method is None:
        raise ValueError(
            f"{type(provider).__name__} declares no state: implement get_state_components() -> list[StateComponent]."
        )
    warnings.warn(
        f"{type(provider).__name__} declares its state by {method}(); all of it is taken as GLOBAL. "
        "Implement get_state_components() and give each component its SharingPattern instead.",
        DeprecationWarning,
        stacklevel=4,
    )
    statefuls: Mapping[str, Stateful | None] = getattr(provider, method)()
    return [
        StateComponent(key, stateful, SharingPattern.GLOBAL, required=stateful is not None)
        for key, stateful in statefuls.items()
    ]


def declared_process_groups(provider: object) -> dict[str, ProcessGroup]:
    """The families of groups that a provider's PER_GROUP components name."""
    return dict(provider.get_process_groups()) if hasattr(provider, "get_process_groups") else {}
