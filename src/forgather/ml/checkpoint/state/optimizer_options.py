"""Options of an optimizer's groups by parameter name: which of them follow a checkpoint, and which stay the user's."""

import copy
import logging
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

# Entries of a group that are no options: the parameters, and torch's own list of their names.
_NOT_OPTIONS = frozenset({"params", "param_names"})

# How this machine computes the update, not what the update is.
_MACHINE_OPTIONS = frozenset({"foreach", "fused", "capturable"})


class OptimizerLike(Protocol):
    """What is needed of an optimizer; one made of several also lists them as `optimizers`."""

    @property
    def state(self) -> MutableMapping[Any, Any]: ...

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


@dataclass(frozen=True)
class Group:
    """A group of the running optimizer; `options` and `state` are the optimizer's own."""

    options: dict[str, Any]
    configured: dict[str, Any]
    state: MutableMapping[Any, Any]
    parameters: dict[str, Tensor]
    optimizer: OptimizerLike
    is_known: bool
    """Whether `configured` is what the user asked for, or only what was found."""

    @property
    def optimizer_name(self) -> str:
        return type(self.optimizer).__name__

    def __str__(self) -> str:
        return f"the group of {listed(list(self.parameters), limit=2)}"


@dataclass(frozen=True)
class SavedGroup:
    """A group of the checkpoint: its options when saved, as configured, and the names of its parameters."""

    options: dict[str, Any]
    configured: dict[str, Any]
    names: frozenset[str]
    is_known: bool


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {option: detached(value) for option, value in group.items() if option not in _NOT_OPTIONS}


def configured_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options as the user set them; a scheduler that is attached already left the user's rate in `initial_lr`."""
    # Copies, because schedulers change a learning rate that is a tensor in place.
    configured = copy.deepcopy(options_of(group))
    if "initial_lr" in configured:
        configured["lr"] = configured.pop("initial_lr")
    return configured


def sources_of(group: Group, saved_groups: Sequence[SavedGroup]) -> list[SavedGroup]:
    """The groups of the checkpoint that the group's parameters were in."""
    return [saved for saved in saved_groups if not saved.names.isdisjoint(group.parameters)]


def load_group_options(group: Group, sources: Sequence[SavedGroup]) -> None:
    restored = restored_options(group, sources)
    for option in _common_options(group, sources):
        if option not in restored:
            _log_kept_option(option, group, sources)
    for option in restored:
        group.options[option] = _adapted(sources[0].options[option], group.options.get(option))


def restored_options(group: Group, sources: Sequence[SavedGroup]) -> list[str]:
    """The options that follow the checkpoint."""
    restored = [option for option in _common_options(group, sources) if _is_restored(option, group, sources)]
    if "lr" in restored and all("initial_lr" in source.options for source in sources):
        # The two belong together: a scheduler built later would take the decayed rate for the configured one.
        restored.append("initial_lr")
    return restored


def _common_options(group: Group, sources: Sequence[SavedGroup]) -> list[str]:
    """The options both sides have, and those that came up while training (absent from what was configured)."""
    if not sources:
        return []
    common = set.intersection(*(set(source.options) for source in sources))
    came_up = common.difference(*(source.configured for source in sources))
    return sorted(((common & set(group.options)) | came_up) - _MACHINE_OPTIONS - {"initial_lr"})


def _is_restored(option: str, group: Group, sources: Sequence[SavedGroup]) -> bool:
    """Whether an option follows the checkpoint: its groups agree on it, and the user has not changed it since."""
    if not _groups_agree(option, sources):
        return False
    origin = _origin_value(option, sources[0])
    are_known = group.is_known and all(source.is_known for source in sources)
    return not are_known or equal(group.configured.get(option, origin), origin)


def _groups_agree(option: str, sources: Sequence[SavedGroup]) -> bool:
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
            "Optimizer option %r of %s stays %s: the checkpoint has these parameters in %d groups that differ in it.",
            *(option, group, group.options.get(option), len(sources)),
        )
        return
    logger.info(
        "Optimizer option %r of %s was configured as %s for the checkpoint and as %s now; the new value is used.",
        *(option, group, _plain(_origin_value(option, sources[0])), _plain(group.configured.get(option))),
    )


def _adapted(value: Any, current: object) -> object:
    """Give a restored option the form it has now: compiled optimizers hold on to a learning rate that is a tensor."""
    if isinstance(current, Tensor):
        with torch.no_grad():
            return current.copy_(torch.as_tensor(value).reshape(current.shape))
    if isinstance(current, list | tuple):
        return type(current)(_adapted(one, mine) for one, mine in zip(value, current, strict=True))
    if isinstance(value, Tensor):
        return value.detach().clone() if current is None else value.item()
    return value


def detached(value: object) -> object:
    """The same value in containers of our own, its tensors sharing memory but without a graph."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {key: detached(inner) for key, inner in value.items()}
    return type(value)(map(detached, value)) if isinstance(value, list | tuple) else value


def _plain(value: object) -> Any:
    """A form that compares and prints alike whether it holds tensors or numbers, tuples or lists."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def comparable(*options: Mapping[str, Any] | None) -> str:
    """A text that is the same for equal options, whatever their order."""
    return repr([None if one is None else sorted(_plain(one).items()) for one in options])


def equal(one: object, other: object) -> bool:
    return bool(_plain(one) == _plain(other))


def listed(names: Sequence[str], limit: int = 20) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
