"""Options of optimizer param groups: which options a checkpoint restores, and which keep the user's value.

An option is restored unless the user has changed it since the checkpoint was saved. So a scheduler's changes survive,
and a new learning rate in the configuration takes effect. `OptimizerState` calls this module.
"""

import copy
import logging
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

# Entries of a group that are not options: the parameters, and the parameter names that torch may add.
_NOT_OPTIONS = frozenset({"params", "param_names"})

# Options that select an implementation and do not change the update. Their values depend on the machine, so they are
# not restored.
MACHINE_OPTIONS = frozenset({"foreach", "fused", "capturable"})


class OptimizerLike(Protocol):
    """Protocol of an optimizer; an optimizer composed of other optimizers also lists them as `optimizers`."""

    @property
    def state(self) -> MutableMapping[Any, Any]: ...

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


@runtime_checkable
class ShardedUpdates(Protocol):
    """Protocol of a wrapper that updates, and keeps state of, only the parameters that this rank owns (ZeRO-1)."""

    @property
    def optimizer(self) -> OptimizerLike: ...

    def owns(self, parameter: Tensor) -> bool: ...


@dataclass(frozen=True)
class Group:
    """Param group of the current optimizer; `options` and `state` are the optimizer's objects, not copies."""

    options: dict[str, Any]
    configured: dict[str, Any]
    state: MutableMapping[Any, Any]
    parameters: dict[str, Tensor]
    optimizer: OptimizerLike
    is_known: bool
    """Whether `configured` is the user's configuration; otherwise it is only a copy of the current options."""
    update_dtype: torch.dtype | None = None
    """Dtype of the updates of low-precision parameters; None: their own dtype."""

    @property
    def optimizer_name(self) -> str:
        return type(self.optimizer).__name__

    def __str__(self) -> str:
        return f"the group of {listed(list(self.parameters), limit=2)}"


@dataclass(frozen=True)
class SavedGroup:
    """Param group of the checkpoint: its options when saved, its configured options, and its parameter names."""

    options: dict[str, Any]
    configured: dict[str, Any]
    names: frozenset[str]
    is_known: bool


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {option: detached(value) for option, value in group.items() if option not in _NOT_OPTIONS}


def configured_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the options as the user configured them."""
    # A deep copy, because schedulers update a tensor learning rate in place.
    configured = copy.deepcopy(options_of(group))
    # An attached scheduler has already changed `lr` and keeps the configured value in `initial_lr`.
    if "initial_lr" in configured:
        configured["lr"] = configured.pop("initial_lr")
    return configured


def sources_of(group: Group, saved_groups: Sequence[SavedGroup]) -> list[SavedGroup]:
    """Return the saved groups that contain parameters of this group."""
    return [saved for saved in saved_groups if not saved.names.isdisjoint(group.parameters)]


def load_group_options(group: Group, sources: Sequence[SavedGroup]) -> None:
    restored = restored_options(group, sources)
    for option in _common_options(group, sources):
        if option not in restored:
            _log_kept_option(option, group, sources)
    for option in restored:
        group.options[option] = _adapted(sources[0].options[option], group.options.get(option))


def restored_options(group: Group, sources: Sequence[SavedGroup]) -> list[str]:
    """Return the names of the options that are restored from the checkpoint."""
    restored = [option for option in _common_options(group, sources) if _is_restored(option, group, sources)]
    if "lr" in restored and all("initial_lr" in source.options for source in sources):
        # `initial_lr` follows `lr`: a scheduler built later would take the decayed `lr` as the configured one.
        restored.append("initial_lr")
    return restored


def _common_options(group: Group, sources: Sequence[SavedGroup]) -> list[str]:
    """Return the options of both sides, and options that were added during training (absent from the configuration)."""
    # A group without saved parameters is new and keeps its options.
    if not sources:
        return []
    common = set.intersection(*(set(source.options) for source in sources))
    came_up = common.difference(*(source.configured for source in sources))
    return sorted(((common & set(group.options)) | came_up) - MACHINE_OPTIONS - {"initial_lr"})


def _is_restored(option: str, group: Group, sources: Sequence[SavedGroup]) -> bool:
    """Return whether an option is restored: the saved groups agree on it, and the user has not changed it."""
    if not _groups_agree(option, sources):
        return False
    origin = _origin_value(option, sources[0])
    # Without the configured options of both runs, a user's change cannot be detected. The checkpoint wins then.
    are_known = group.is_known and all(source.is_known for source in sources)
    return not are_known or equal(group.configured.get(option, origin), origin)


def _groups_agree(option: str, sources: Sequence[SavedGroup]) -> bool:
    # There is more than one source if the parameters were in other groups when they were saved.
    first = sources[0]
    return all(
        equal(source.options[option], first.options[option])
        and equal(_origin_value(option, source), _origin_value(option, first))
        for source in sources[1:]
    )


def _origin_value(option: str, source: SavedGroup) -> object:
    return source.configured.get(option, source.options[option])


def _log_kept_option(option: str, group: Group, sources: Sequence[SavedGroup]) -> None:
    if not _groups_agree(option, sources):
        logger.warning(
            "Optimizer option %r of %s stays %s: the checkpoint has these parameters in %d groups with different values.",
            *(option, group, group.options.get(option), len(sources)),
        )
        return
    # Only information, because the user has changed the configuration on purpose.
    logger.info(
        "Optimizer option %r of %s was configured as %s for the checkpoint and as %s now; the new value is used.",
        *(option, group, _plain(_origin_value(option, sources[0])), _plain(group.configured.get(option))),
    )


def _adapted(value: Any, current: object) -> object:
    """Return a restored option in the type of the current option."""
    if isinstance(current, Tensor):
        # Compiled optimizers keep a reference to a tensor learning rate, so it is updated in place.
        with torch.no_grad():
            return current.copy_(torch.as_tensor(value).reshape(current.shape))
    if isinstance(current, list | tuple):
        return type(current)(_adapted(one, mine) for one, mine in zip(value, current, strict=True))
    # The saved run may have used a tensor learning rate, and this run a number.
    if isinstance(value, Tensor):
        return value.detach().clone() if current is None else value.item()
    return value


def detached(value: object) -> object:
    """Return the value in new containers with detached tensors, which share memory with the originals."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {key: detached(inner) for key, inner in value.items()}
    return type(value)(map(detached, value)) if isinstance(value, list | tuple) else value


def _plain(value: object) -> Any:
    """Convert tensors to numbers and tuples to lists, so that equal options compare and print equally."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def comparable(*options: Mapping[str, Any] | None) -> str:
    """Return a string that is equal for equal options in any order."""
    return repr([None if one is None else sorted(_plain(one).items()) for one in options])


def equal(one: object, other: object) -> bool:
    return bool(_plain(one) == _plain(other))


def listed(names: Sequence[str], limit: int = 20) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
