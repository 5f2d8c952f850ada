"""Parameter groups by regular expressions over parameter names (FQNs), and the optimizers for them.

The comment above `OptimGroupMap` describes the format. Called by the trainers for `optimizer_groups`, and usable alone.
With `names_elsewhere`, all ranks get the same groups in the same order, even for parameters that they do not hold.
"""

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from forgather.ml.optim.multiopt import Multiopt

logger = logging.getLogger(__name__)

# A group map names the groups, most specific first:
#
#     {
#         "embeddings": {"regex": r"\bembed", "config": {"lr": 1e-3}},
#         "matrices": {"regex": r"proj\.weight$", "factory": make_muon},
#         "no_decay": {"regex": r"bias$|norm", "config": {"weight_decay": 0.0}},
#     }
#
# `regex` is searched for in a parameter's full name; the first group that matches takes the parameter. `config` holds
# options of the group; the optimizer's defaults apply to all other options. `factory` makes the group's optimizer from a
# list of group dicts, instead of the default factory. Parameters that no regex matches go to the group without a regex,
# or to an implicit group without options, which comes last. None disables a group: a configuration that extends another
# one can turn off one of its groups.
OptimGroupMap = Mapping[str, Mapping[str, Any] | None]
OptimizerFactory = Callable[[list[dict[str, Any]]], Optimizer]

_KEYS = ("regex", "config", "factory")
_IMPLICIT_GROUP = "(rest)"


@dataclass
class _Group:
    """Group of the map; a group without a pattern takes the parameters that no other group matches."""

    name: str
    pattern: re.Pattern[str] | None
    config: Mapping[str, Any]
    factory: OptimizerFactory | None
    members: list[tuple[str, Tensor]] = field(default_factory=list)

    def to_torch(self) -> dict[str, Any]:
        # Torch takes the names from the members, and rejects groups if only some of them have names.
        names: dict[str, Any] = {} if self.members else {"param_names": []}
        return {"params": self.members, **names, **self.config}


def build_parameter_groups(
    named_parameters: Iterable[tuple[str, Tensor]],
    groups: OptimGroupMap,
    debug: bool = False,
    names_elsewhere: Iterable[str] = (),
) -> list[dict[str, Any]]:
    """Sort trainable parameters into groups for a torch optimizer; the groups carry the parameters' names.

    Empty groups are omitted, unless they match one of `names_elsewhere`: ranks with different parameters of a model
    then have the same groups and the same schedule. Factories are ignored, since one optimizer takes all the groups.
    """
    return [group.to_torch() for group in _filled_groups(named_parameters, groups, debug, names_elsewhere)]


def build_optimizer_buckets(
    named_parameters: Iterable[tuple[str, Tensor]],
    groups: OptimGroupMap,
    default_factory: OptimizerFactory | None = None,
    debug: bool = False,
    names_elsewhere: Iterable[str] = (),
) -> list[tuple[OptimizerFactory, list[dict[str, Any]]]]:
    """Return the groups of `build_parameter_groups`, collected by the factory that makes their optimizer.

    `default_factory` is for groups without a factory, and may be omitted if every group has one.
    """
    buckets: list[tuple[OptimizerFactory, list[dict[str, Any]]]] = []
    for group in _filled_groups(named_parameters, groups, debug, names_elsewhere):
        factory = group.factory or default_factory
        if factory is None:
            raise _no_factory(group)
        # Not a dict: factories do not have to be hashable.
        for known, members in buckets:
            if known == factory:
                members.append(group.to_torch())
                break
        else:
            buckets.append((factory, [group.to_torch()]))
    return buckets


def make_grouped_optimizer(
    named_parameters: Iterable[tuple[str, Tensor]],
    optimizer_groups: OptimGroupMap | None = None,
    optimizer_factory: OptimizerFactory | None = None,
    debug: bool = False,
    names_elsewhere: Iterable[str] = (),
) -> Optimizer:
    """Return one optimizer for all groups: a `Multiopt` if the groups have different factories.

    `optimizer_factory` makes the optimizer of groups without a factory. `optimizer_groups=None` puts everything in one
    group.
    """
    buckets = build_optimizer_buckets(
        named_parameters, optimizer_groups or {}, optimizer_factory, debug, names_elsewhere
    )
    optimizers = [
        factory(groups) if any(group["params"] for group in groups) else optimizer_of_nothing(factory, groups)
        for factory, groups in buckets
    ]
    return optimizers[0] if len(optimizers) == 1 else Multiopt(optimizers)


def _no_factory(group: _Group) -> ValueError:
    return ValueError(
        f"Optimizer group {group.name!r} has no factory, and there is no default factory. Pass optimizer_factory "
        "(default_factory of build_optimizer_buckets), or add a factory to the group."
    )


def optimizer_of_nothing(factory: Callable[[list[Any]], Optimizer], groups: Sequence[dict[str, Any]] = ()) -> Optimizer:
    """Return an optimizer without parameters, for ranks that have none or have empty groups only.

    It has the options that other ranks' optimizers have. The factory gets a placeholder parameter, which is removed
    again, because many optimizers reject an empty parameter list.
    """
    # Two-dimensional, because some optimizers accept matrices only.
    member = ("", nn.Parameter(torch.empty((0, 0))))
    first, *others = groups or [{}]
    optimizer = factory([{**first, "params": [member]}, *others] if groups else [member])
    for group in optimizer.param_groups:
        group["params"] = []
        if "param_names" in group:
            group["param_names"] = []
    # Some optimizers create state in their constructor.
    optimizer.state.pop(member[1], None)
    return optimizer


def check_group_map(group_map: OptimGroupMap) -> None:
    """Raise `ValueError` unless the group map is valid, whatever the model."""
    if not isinstance(group_map, Mapping):
        raise ValueError(
            f"optimizer_groups={group_map!r} cannot be used: pass a mapping of group names to settings, such as "
            '{"biases": {"regex": "bias$", "config": {"weight_decay": 0.0}}}.'
        )
    _groups_of(group_map)


def _filled_groups(
    named_parameters: Iterable[tuple[str, Tensor]],
    group_map: OptimGroupMap,
    debug: bool,
    names_elsewhere: Iterable[str],
) -> list[_Group]:
    groups = _groups_of(group_map)
    named = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    names = [*(name for name, _ in named), *names_elsewhere]
    if not names:
        raise ValueError("There is nothing to train: the model has no parameter that requires a gradient.")
    for name, parameter in named:
        _group_for(name, groups).members.append((name, parameter))
    # By id, because dataclasses with `eq` are not hashable.
    used = {id(_group_for(name, groups)) for name in names}
    _warn_of_unused([group for group in groups if id(group) not in used], names)
    if debug:
        _log_assignment(groups)
    return [group for group in groups if id(group) in used]


def _groups_of(group_map: OptimGroupMap) -> list[_Group]:
    """Return the groups in the order of matching; the last one takes the rest."""
    groups = [_parsed(name, settings) for name, settings in group_map.items() if settings is not None]
    rest = [group for group in groups if group.pattern is None]
    if len(rest) > 1:
        names = ", ".join(repr(group.name) for group in rest)
        raise ValueError(
            f"The optimizer groups {names} have no regex, but only one group can take the remaining parameters. Give all "
            "but one of them a regex."
        )
    last = rest or [_Group(_IMPLICIT_GROUP, None, {}, None)]
    return [group for group in groups if group.pattern is not None] + last


def _parsed(name: str, settings: Mapping[str, Any]) -> _Group:
    if not isinstance(settings, Mapping):
        raise ValueError(f"Optimizer group {name!r} is {settings!r}, but must be a mapping of {', '.join(_KEYS)}.")
    if unknown := [key for key in settings if key not in _KEYS]:
        raise ValueError(
            f"Optimizer group {name!r} has {unknown}, but a group has only {', '.join(_KEYS)}. Options of the "
            'optimizer, such as lr, go in its "config".'
        )
    regex = settings.get("regex")
    if not isinstance(regex, str | None):
        raise ValueError(f"Optimizer group {name!r} has regex={regex!r}, but a regular expression must be a string.")
    try:
        pattern = None if regex is None else re.compile(regex)
    except re.error as error:
        raise ValueError(f"Optimizer group {name!r}: {regex!r} is not a regular expression: {error}.") from None
    config, factory = settings.get("config") or {}, settings.get("factory")
    if not isinstance(config, Mapping):
        raise ValueError(f"Optimizer group {name!r} has config={config!r}, but it must map options to values.")
    if factory is not None and not callable(factory):
        raise ValueError(
            f"Optimizer group {name!r} has factory={factory!r}, but a factory must take a list of group dicts."
        )
    _check_rate(name, config)
    return _Group(name, pattern, config, factory)


def _check_rate(name: str, config: Mapping[str, Any]) -> None:
    # Torch validates the defaults of an optimizer, but not the options of its groups.
    rate = config.get("lr", 0.0)
    if isinstance(rate, (int, float)) and not rate >= 0:
        raise ValueError(f"Optimizer group {name!r} has lr={rate!r}, but a learning rate must be 0 or more.")


def warn_of_unknown_options(optimizer: Optimizer, group_map: OptimGroupMap) -> None:
    """Log a warning for options of groups that the optimizer does not have: torch accepts misspelt options silently."""
    parts = getattr(optimizer, "optimizers", [optimizer])
    options = [getattr(part, "defaults", None) for part in (parts.values() if isinstance(parts, Mapping) else parts)]
    # Optimizers of other libraries may not list their options; then nothing can be checked.
    if any(one is None for one in options):
        return
    known = {option for one in options for option in one or ()}
    for name, settings in group_map.items():
        unknown = [option for option in (settings or {}).get("config") or {} if option not in known]
        if unknown:
            logger.warning(
                "Optimizer group %r sets %s, which %s does not list among its options (%s): is it misspelt?",
                *(name, ", ".join(unknown), type(optimizer).__name__, ", ".join(sorted(known))),
            )


def _group_for(name: str, groups: Sequence[_Group]) -> _Group:
    return next(group for group in groups if group.pattern is None or group.pattern.search(name))


def _warn_of_unused(unused: Sequence[_Group], names: Sequence[str]) -> None:
    for group in unused:
        # It is normal that every parameter matches a regex.
        if group.pattern is None:
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
