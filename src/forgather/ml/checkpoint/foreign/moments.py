"""Optimizer state of other programs: index-keyed moments become moments by FQN.

torch numbers parameters in the order of the parameter groups. Which names these are follows from how the other program
made its groups, so an order counts only if the groups have the same sizes and all moments the shapes of their parameters.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.checkpoint.foreign.ownership import Owner
from forgather.ml.checkpoint.state.optimizer_checks import check_structure, saved_shapes
from forgather.ml.checkpoint.state.optimizer_options import configured_options, options_of

Groups = list[list[str]]
"""The names of the parameters of each group."""
Shapes = Mapping[str, tuple[int, ...]]

# Entries of a group that say nothing of the kind of optimizer.
_NO_KIND = frozenset({"params", "param_names", "initial_lr"})

# transformers.Trainer exempts parameters with these in their name, and all of nn.LayerNorm, from weight decay.
_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def possible_orders(owner: Owner, modules: Sequence[nn.Module], present: Groups) -> list[Groups]:
    """The groups that the other program may have made, the most likely first; `present` are those of this run."""
    named = [pair for module in modules for pair in module.named_parameters()]
    trainable = [name for name, parameter in named if parameter.requires_grad]
    single = [[trainable], [[name for name, _ in named]]]
    if owner is Owner.TRANSFORMERS:
        return [_decay_groups(modules, trainable), *single]
    return [present, *single]


def _decay_groups(modules: Sequence[nn.Module], names: Iterable[str]) -> Groups:
    """The two groups of transformers.Trainer: with weight decay, and without."""
    undecayed = {
        f"{prefix}.{name}" if prefix else name
        for module in modules
        for prefix, inner in module.named_modules(remove_duplicate=False)
        if isinstance(inner, nn.LayerNorm)
        for name, _ in inner.named_parameters(remove_duplicate=False)
    }
    groups: Groups = [[], []]
    for name in names:
        groups[name in undecayed or _UNDECAYED.search(name.lower()) is not None].append(name)
    return groups


def moments_by_name(state: Any, orders: Sequence[Groups], shapes: Shapes) -> dict[str, Any]:
    """The state by parameter name, or `CheckpointLoadError` if it fits none of the orders."""
    _check_parts(state)
    groups = state["param_groups"]
    named = [_stated_names(group) for group in groups]
    if all(names is not None for names in named):
        return _renamed(state, [names or [] for names in named], shapes)
    if not all(type(index) is int for group in groups for index in group["params"]):
        raise CheckpointLoadError("its parameters are neither numbered nor named")
    reasons = []
    for order in orders:
        try:
            return _renamed(state, order, shapes)
        except CheckpointLoadError as error:
            reasons.append(str(error))
    raise CheckpointLoadError(f"its parameter groups do not fit the model: {'; or '.join(dict.fromkeys(reasons))}")


def require_same_kind(saved: Iterable[Mapping[str, Any]], present: Iterable[Mapping[str, Any]]) -> None:
    """Raise `CheckpointLoadError` if both optimizers have options that the other lacks: their state means other things."""
    theirs = {option for group in saved for option in group} - _NO_KIND
    ours = {option for group in present for option in group} - _NO_KIND
    if theirs - ours and ours - theirs:
        raise CheckpointLoadError(
            f"it belongs to another kind of optimizer: only that one has {sorted(map(str, theirs - ours))}, only this run's "
            f"has {sorted(ours - theirs)}"
        )


def _stated_names(group: Mapping[str, Any]) -> list[str] | None:
    """The names that the file itself has for a group: as `param_names` of torch, or as its keys."""
    for names in (group.get("param_names"), group["params"]):
        if isinstance(names, list) and all(type(name) is str for name in names) and len(names) == len(group["params"]):
            return names
    return None


def _check_parts(state: Any) -> None:
    parts = state if isinstance(state, dict) else {}
    groups, moments = parts.get("param_groups"), parts.get("state")
    if not isinstance(moments, dict) or not isinstance(groups, list) or not groups:
        raise CheckpointLoadError("it is no state of a torch optimizer: it lacks state or param_groups")
    if not all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups):
        raise CheckpointLoadError("it is no state of a torch optimizer: a parameter group lists no params")
    if not all(type(index) in (int, str) for group in groups for index in group["params"]):
        raise CheckpointLoadError("it is no state of a torch optimizer: its parameters are neither numbered nor named")


def _renamed(state: Mapping[str, Any], order: Groups, shapes: Shapes) -> dict[str, Any]:
    sizes, wanted = [len(group["params"]) for group in state["param_groups"]], [len(names) for names in order]
    if sizes != wanted:
        raise CheckpointLoadError(f"it has groups of {sizes} parameters, and the model makes groups of {wanted}")
    pairs = zip(state["param_groups"], order, strict=True)
    names = {
        index: name for group, group_names in pairs for index, name in zip(group["params"], group_names, strict=True)
    }
    moments = {names.get(index, index): one for index, one in state["state"].items()}
    options = [options_of(group) for group in state["param_groups"]]
    renamed = {
        "state": moments,
        "param_groups": [{**one, "params": list(group)} for one, group in zip(options, order, strict=True)],
        "initial_options": [_configured(one) for one in options],
    }
    check_structure(renamed)
    for name, one in moments.items():
        for shape in saved_shapes(None, one) - {shapes.get(name)}:
            raise CheckpointLoadError(
                f"the moments in the place of {name!r} have shape {list(shape)}, and the parameter has "
                f"{list(shapes.get(name, ()))}"
            )
    return renamed


def _configured(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the user configured there, known where a schedule left the first learning rate; a change made now wins."""
    return configured_options(options) if "initial_lr" in options else None
