"""Optimizer state of other programs: converts moments by index to moments by FQN.

torch numbers parameters in the order of the parameter groups, so the names depend on how the other program built its
groups. An order is accepted only if all group sizes and all moment shapes match. `importing` calls this module.
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
"""Names of the parameters of each group."""
Shapes = Mapping[str, tuple[int, ...]]

# Entries of a group that do not depend on the kind of optimizer.
_NO_KIND = frozenset({"params", "param_names", "initial_lr"})

# transformers.Trainer applies no weight decay to parameters with these names, nor to parameters of nn.LayerNorm.
_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def possible_orders(owner: Owner, modules: Sequence[nn.Module], present: Groups) -> list[Groups]:
    """Return the groupings that the other program may have used, most likely first; `present` is this run's grouping."""
    named = [pair for module in modules for pair in module.named_parameters()]
    trainable = [name for name, parameter in named if parameter.requires_grad]
    # Some programs pass only trainable parameters to the optimizer, others pass model.parameters().
    single = [[trainable], [[name for name, _ in named]]]
    if owner is Owner.TRANSFORMERS:
        return [_decay_groups(modules, trainable), *single]
    return [present, *single]


def _decay_groups(modules: Sequence[nn.Module], names: Iterable[str]) -> Groups:
    """Return the two groups of transformers.Trainer: with and without weight decay."""
    # Duplicates included, because a tied parameter may be listed under its name in another module.
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
    """Return the state by parameter name; raise `CheckpointLoadError` if it fits none of the orders."""
    _check_parts(state)
    groups = state["param_groups"]
    named = [_stated_names(group) for group in groups]
    # Names in the file are certain, so no order has to be guessed.
    if all(names is not None for names in named):
        return _renamed(state, [names or [] for names in named], shapes)
    if not all(type(index) is int for group in groups for index in group["params"]):
        raise CheckpointLoadError("its parameters are neither numbered nor named")
    reasons = []
    # The first order that fits wins, so `orders` has the most likely first.
    for order in orders:
        try:
            return _renamed(state, order, shapes)
        except CheckpointLoadError as error:
            reasons.append(str(error))
    raise CheckpointLoadError(f"its parameter groups do not fit the model: {'; or '.join(dict.fromkeys(reasons))}")


def require_same_kind(saved: Iterable[Mapping[str, Any]], present: Iterable[Mapping[str, Any]]) -> None:
    """Raise `CheckpointLoadError` if the two optimizers are of different kinds, judged by their options."""
    # Only if both have options that the other lacks: between torch versions one side of the same kind has more.
    theirs = {option for group in saved for option in group} - _NO_KIND
    ours = {option for group in present for option in group} - _NO_KIND
    if theirs - ours and ours - theirs:
        raise CheckpointLoadError(
            "it belongs to a different kind of optimizer: only the saved optimizer has "
            f"{sorted(map(str, theirs - ours))}, only this run's has {sorted(ours - theirs)}"
        )


def _stated_names(group: Mapping[str, Any]) -> list[str] | None:
    """Return the parameter names that the file has for a group, from torch's `param_names` or from `params`."""
    for names in (group.get("param_names"), group["params"]):
        if isinstance(names, list) and all(type(name) is str for name in names) and len(names) == len(group["params"]):
            return names
    return None


def _check_parts(state: Any) -> None:
    parts = state if isinstance(state, dict) else {}
    groups, moments = parts.get("param_groups"), parts.get("state")
    if not isinstance(moments, dict) or not isinstance(groups, list) or not groups:
        raise CheckpointLoadError("it is not the state of a torch optimizer: it lacks state or param_groups")
    if not all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups):
        raise CheckpointLoadError("it is not the state of a torch optimizer: a parameter group lists no params")
    if not all(type(index) in (int, str) for group in groups for index in group["params"]):
        raise CheckpointLoadError("it is not the state of a torch optimizer: its parameters have no numbers or names")


def _renamed(state: Mapping[str, Any], order: Groups, shapes: Shapes) -> dict[str, Any]:
    sizes, wanted = [len(group["params"]) for group in state["param_groups"]], [len(names) for names in order]
    if sizes != wanted:
        raise CheckpointLoadError(f"it has groups of {sizes} parameters, but the model has groups of {wanted}")
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
    # Groups of equal sizes can still have another order. A moment with the wrong shape reveals most of them.
    for name, one in moments.items():
        for shape in saved_shapes(None, one) - {shapes.get(name)}:
            raise CheckpointLoadError(
                f"the moments for {name!r} have shape {list(shape)}, but the parameter has {list(shapes.get(name, ()))}"
            )
    return renamed


def _configured(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the options that the other run was configured with, or None if they are unknown."""
    # A schedule records the configured learning rate as `initial_lr`. Options that this run configures differently win
    # over the checkpoint, which needs the configured values for the comparison.
    return configured_options(options) if "initial_lr" in options else None
