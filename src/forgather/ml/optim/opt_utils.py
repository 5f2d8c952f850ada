r"""Parameter groups by the names of the parameters.

A group map names the groups, most specific first:

    {
        "embeddings": {"regex": r"\bembed", "config": {"lr": 1e-3}},
        "matrices": {"regex": r"proj\.weight$", "factory": make_muon},
        "no_decay": {"regex": r"bias$|norm", "config": {"weight_decay": 0.0}},
    }

`regex` is searched for in a parameter's full name, and the first group that matches takes it. `config` are options of the
group; the optimizer's own values hold for the others. `factory` makes the group's optimizer from a list of group dicts,
instead of the factory that is used for the rest. What no regex matches comes last: in the group without a regex if there
is one, else in an implicit group without options. A group that is None is switched off, which lets a configuration turn
off a group of the one it extends.
"""

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from forgather.ml.optim.multiopt import Multiopt

logger = logging.getLogger(__name__)

OptimGroupMap = Mapping[str, Mapping[str, Any] | None]
OptimizerFactory = Callable[[list[dict[str, Any]]], Optimizer]

_KEYS = ("regex", "config", "factory")
_IMPLICIT_GROUP = "(rest)"


@dataclass
class _Group:
    """A group of the map; without a pattern it takes what no other group does."""

    name: str
    pattern: re.Pattern[str] | None
    config: Mapping[str, Any]
    factory: OptimizerFactory | None
    members: list[tuple[str, Tensor]] = field(default_factory=list)

    def to_torch(self) -> dict[str, Any]:
        return {"params": self.members, **self.config}


def build_parameter_groups(
    named_parameters: Iterable[tuple[str, Tensor]], group_map: OptimGroupMap, debug: bool = False
) -> list[dict[str, Any]]:
    """Sort trainable parameters into groups for a torch optimizer; the groups carry the parameters' names.

    Groups that are empty are left out. Factories are not looked at: one optimizer is to take all the groups.
    """
    return [group.to_torch() for group in _filled_groups(named_parameters, group_map, debug)]


def build_optimizer_buckets(
    named_parameters: Iterable[tuple[str, Tensor]],
    group_map: OptimGroupMap,
    default_factory: OptimizerFactory,
    debug: bool = False,
) -> list[tuple[OptimizerFactory, list[dict[str, Any]]]]:
    """The groups of `build_parameter_groups`, by the factory that makes their optimizer."""
    buckets: list[tuple[OptimizerFactory, list[dict[str, Any]]]] = []
    for group in _filled_groups(named_parameters, group_map, debug):
        factory = group.factory or default_factory
        # Not a dict: factories need not be hashable.
        for known, groups in buckets:
            if known == factory:
                groups.append(group.to_torch())
                break
        else:
            buckets.append((factory, [group.to_torch()]))
    return buckets


def make_grouped_optimizer(
    named_parameters: Iterable[tuple[str, Tensor]],
    group_map: OptimGroupMap,
    default_factory: OptimizerFactory,
    debug: bool = False,
) -> Optimizer:
    """One optimizer for all groups, which is a `Multiopt` when they have several factories."""
    buckets = build_optimizer_buckets(named_parameters, group_map, default_factory, debug)
    optimizers = [factory(groups) for factory, groups in buckets]
    return optimizers[0] if len(optimizers) == 1 else Multiopt(optimizers)


def _filled_groups(
    named_parameters: Iterable[tuple[str, Tensor]], group_map: OptimGroupMap, debug: bool
) -> list[_Group]:
    groups = _groups_of(group_map)
    named = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    if not named:
        raise ValueError("There is nothing to optimize: the model has no parameter that requires a gradient.")
    for name, parameter in named:
        _group_for(name, groups).members.append((name, parameter))
    _warn_of_unused(groups, [name for name, _ in named])
    if debug:
        _log_assignment(groups)
    return [group for group in groups if group.members]


def _groups_of(group_map: OptimGroupMap) -> list[_Group]:
    """The groups in the order in which they are tried; the last one takes the rest."""
    groups = [_parsed(name, settings) for name, settings in group_map.items() if settings is not None]
    rest = [group for group in groups if group.pattern is None]
    if len(rest) > 1:
        names = ", ".join(repr(group.name) for group in rest)
        raise ValueError(
            f"The optimizer groups {names} have no regex, so which one takes the parameters that match no other is "
            "unclear. Give all but one of them a regex."
        )
    last = rest or [_Group(_IMPLICIT_GROUP, None, {}, None)]
    return [group for group in groups if group.pattern is not None] + last


def _parsed(name: str, settings: Mapping[str, Any]) -> _Group:
    if unknown := [key for key in settings if key not in _KEYS]:
        raise ValueError(
            f"Optimizer group {name!r} has {unknown}, but a group has only {', '.join(_KEYS)}. Options of the "
            'optimizer, such as lr, go in its "config".'
        )
    regex = settings.get("regex")
    try:
        pattern = None if regex is None else re.compile(regex)
    except re.error as error:
        raise ValueError(f"Optimizer group {name!r}: {regex!r} is not a regular expression: {error}.") from None
    return _Group(name, pattern, settings.get("config") or {}, settings.get("factory"))


def _group_for(name: str, groups: Sequence[_Group]) -> _Group:
    return next(group for group in groups if group.pattern is None or group.pattern.search(name))


def _warn_of_unused(groups: Sequence[_Group], names: Sequence[str]) -> None:
    for group in groups:
        if group.pattern is None or group.members:
            continue
        taken = any(group.pattern.search(name) for name in names)
        logger.warning(
            "Optimizer group %r is not used: its regex %r %s.",
            *(group.name, group.pattern.pattern),
            "matches only parameters that earlier groups took" if taken else "matches no trainable parameter",
        )


def _log_assignment(groups: Sequence[_Group]) -> None:
    for group in groups:
        logger.info(
            "Optimizer group %s: %d parameters, %s%s",
            *(group.name, len(group.members), dict(group.config) or "default options"),
            "".join(f"\n    {name} {tuple(parameter.shape)}" for name, parameter in group.members),
        )
