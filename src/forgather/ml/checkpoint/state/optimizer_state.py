"""Optimizer state by parameter name, so that it survives another order, grouping or split of the parameters.

What a state dict holds:

- `state`: name -> what the optimizer remembers about that parameter;
- `param_groups`: the groups' options as they are now, `params` being names;
- `initial_options`: the options of the same groups as the user configured them, to tell a user's change (which wins)
  from what a scheduler did (which is restored);
- `parameters`: name -> shape and dtype of the parameter, the class of its optimizer and the keys of its state, to judge
  whether a state fits and is complete.
"""

import copy
import logging
from collections import ChainMap, Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.checkpoint.state.optimizer_checks import (
    StateChecks,
    check_buffers_of_options,
    check_option,
    check_structure,
    is_fused,
    is_of_torch,
    saved_shapes,
    state_keys,
    with_number_tensors,
)
from forgather.ml.checkpoint.state.optimizer_options import (
    Group,
    OptimizerLike,
    SavedGroup,
    comparable,
    configured_options,
    detached,
    listed,
    load_group_options,
    options_of,
    restored_options,
    sources_of,
)
from forgather.ml.checkpoint.state.tensor_checks import Where, check_sharing, owned, same_strides

logger = logging.getLogger(__name__)


class OptimizerState:
    """Saves and restores a torch optimizer by parameter name.

    `named_parameters` covers the whole model, or chains those of several stages; a parameter with several names (tied)
    is stored under the first. Construct it when the optimizer is built: the options found now count as the user's.
    Later, when training may have changed them, say `knows_configuration=False`: options then follow the checkpoint.
    """

    def __init__(
        self,
        optimizer: OptimizerLike,
        named_parameters: Iterable[tuple[str, Tensor]],
        knows_configuration: bool = True,
    ) -> None:
        self._knows_configuration = knows_configuration
        self._optimizers = list(_elementary_optimizers(optimizer))
        self._names = _names_by_parameter(named_parameters)
        self._configured: dict[str, dict[str, Any]] = {}
        self._groups()

    def state_dict(self) -> dict[str, Any]:
        """Return the state by name; its tensors are the optimizer's own, not copies."""
        groups = self._groups()
        self._refuse_state_of_no_parameter()
        named = [(name, parameter, group) for group in groups for name, parameter in group.parameters.items()]
        return {
            "state": {name: detached(group.state[p]) for name, p, group in named if group.state.get(p)},
            "param_groups": [{**options_of(group.options), "params": list(group.parameters)} for group in groups],
            "initial_options": [dict(group.configured) if group.is_known else None for group in groups],
            "parameters": {
                name: {
                    "shape": list(p.shape),
                    "dtype": str(p.dtype),
                    "optimizer": group.optimizer_name,
                    "state": state_keys(group.state.get(p)),
                }
                for name, p, group in named
            },
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore by name; the tensors of `state_dict` may become the optimizer's own, so hand over ones you own.

        Parameters the checkpoint does not know start fresh, its other names are ignored. Nothing is changed when the
        state does not fit.
        """
        self.check_state_dict(state_dict)
        groups, saved_groups = self._groups(), _saved_groups(state_dict)
        for group in groups:
            _load_group_state(group, state_dict)
            load_group_options(group, sources_of(group, saved_groups))
        known = _known_names(state_dict, saved_groups)
        if fresh := [name for group in groups for name in group.parameters if name not in known]:
            logger.warning("The checkpoint lacks parameters whose optimizer state starts fresh: %s", listed(fresh))

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise `CheckpointLoadError` unless `load_state_dict` can use the state; nothing is changed.

        A tensor must have the shape, dtype and memory layout that the optimizer would give it, and share memory with no
        other one: what a fused kernel reads out of bounds ends the process or is trained on.
        """
        check_structure(state_dict)
        check_buffers_of_options(state_dict)
        groups, saved_groups = self._groups(), _saved_groups(state_dict)
        _require_overlap(groups, _known_names(state_dict, saved_groups))
        checks = StateChecks()
        for group in groups:
            sources = sources_of(group, saved_groups)
            _require_fit(group, sources, state_dict)
            for name, parameter in group.parameters.items():
                saved, existing = state_dict["state"].get(name, {}), group.state.get(parameter) or {}
                checks.check(name, saved, parameter, group.optimizer, existing)
            for option in restored_options(group, sources):
                current = group.options.get(option, group.options.get("lr") if option == "initial_lr" else None)
                check_option(option, sources[0].options[option], current, group)
        checks.finish()

    def missing_names(self, state_dict: Mapping[str, Any]) -> list[str]:
        """The parameters of this optimizer that a state does not know: another stage's state may."""
        check_structure(state_dict)
        known = _known_names(state_dict, _saved_groups(state_dict))
        return [name for group in self._groups() for name in group.parameters if name not in known]

    def add_tied_names(self, state_dict: dict[str, Any], sharing: Sequence[Sequence[str]]) -> None:
        """Let parameters here that were tied to others when saved (`sharing`: groups of names) find those others' state.

        A tied parameter is stored under its first name alone, and a stage may have it under another.
        """
        missing = self.missing_names(state_dict)
        check_sharing(sharing, Where("the parameters of the checkpoint", "optimizer"))
        known = _known_names(state_dict, _saved_groups(state_dict))
        for name in missing:
            others = [other for group in sharing if name in group for other in group if other in known]
            if others:
                _add_name(state_dict, name, others[0])

    @staticmethod
    def merge_state_dicts(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Join the states of several ranks or stages; of a name in several parts (replicas) the first one counts."""
        merged: dict[str, Any] = {"state": {}, "param_groups": [], "initial_options": [], "parameters": {}}
        placed: set[str] = set()
        by_options: dict[str, Any] = {}
        for part in parts:
            check_structure(part)
            merged["state"] |= {name: state for name, state in part["state"].items() if name not in merged["state"]}
            merged["parameters"] = part.get("parameters", {}) | merged["parameters"]
            for saved, group in zip(_saved_groups(part), part["param_groups"], strict=True):
                names = [name for name in group["params"] if name not in placed]
                placed.update(names)
                if names:
                    _join_group(merged, by_options, saved, names)
        return merged

    def _groups(self) -> list[Group]:
        """The optimizer's groups as they are now; the options of parameters not seen before are noted as the user's."""
        groups: list[Group] = []
        for optimizer in self._optimizers:
            for index, options in enumerate(optimizer.param_groups):
                names = [self._name(parameter, index, i) for i, parameter in enumerate(options["params"])]
                configured = configured_options(options)
                for name in names:
                    self._configured.setdefault(name, configured)
                configured = self._configured[names[0]] if names else configured
                parameters = dict(zip(names, options["params"], strict=True))
                known = self._knows_configuration
                groups.append(Group(options, configured, optimizer.state, parameters, optimizer, known))
        counts = Counter(name for group in groups for name in group.parameters)
        if shared := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"Updated by several optimizers, so which state is theirs is unclear: {listed(shared)}")
        return groups

    def _name(self, parameter: Tensor, group_index: int, index: int) -> str:
        if parameter not in self._names:
            raise ValueError(
                f"Parameter {index} of optimizer group {group_index}, of shape {tuple(parameter.shape)}, has no name: "
                "it is not among the named_parameters. Its state is stored by name, so pass the named parameters of "
                "every module that this optimizer updates."
            )
        return self._names[parameter]

    def _refuse_state_of_no_parameter(self) -> None:
        for optimizer in self._optimizers:
            if others := [key for key in optimizer.state if not isinstance(key, Tensor)]:
                raise ValueError(
                    f"{type(optimizer).__name__} keeps state under {others[0]!r}, which is no parameter. Such state "
                    "cannot be matched by parameter name; keep it per parameter, or as an option of the param group."
                )


def _elementary_optimizers(optimizer: OptimizerLike) -> Iterator[OptimizerLike]:
    """Take an optimizer made of several apart, and refuse what cannot be stored by name."""
    parts = getattr(optimizer, "optimizers", None)
    if parts is not None:
        for part in parts.values() if isinstance(parts, Mapping) else parts:
            yield from _elementary_optimizers(part)
        return
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            f"{name} cannot be stored by parameter name: it keeps one flat history for all parameters in their order, "
            "under the first of them. Use a per-parameter optimizer, or leave the optimizer out of the checkpoint."
        )
    if isinstance(optimizer.state, ChainMap) or optimizer.state is not optimizer.state:
        # Writes to such a view would be lost, or reach the wrong one of the optimizers behind it.
        raise ValueError(
            f"The state of {name} is a view of several optimizers, which cannot be written to. Let it list these "
            "optimizers in an attribute `optimizers`."
        )
    yield optimizer


def _names_by_parameter(named_parameters: Iterable[tuple[str, Tensor]]) -> dict[Tensor, str]:
    by_name: dict[str, Tensor] = {}
    names: dict[Tensor, str] = {}
    for name, parameter in named_parameters:
        if by_name.setdefault(name, parameter) is not parameter:
            raise ValueError(
                f"Two different parameters are both named {name!r}, of shapes {tuple(by_name[name].shape)} and "
                f"{tuple(parameter.shape)}. Stage modules have to keep the names of the whole model."
            )
        names.setdefault(parameter, name)
    return names


def _saved_groups(state_dict: Mapping[str, Any]) -> list[SavedGroup]:
    groups = state_dict["param_groups"]
    configured = state_dict.get("initial_options") or [None for _ in groups]
    return [
        SavedGroup(
            options=options_of(group),
            configured=configured_options(group) if origin is None else origin,
            names=frozenset(group["params"]),
            is_known=origin is not None,
        )
        for group, origin in zip(groups, configured, strict=True)
    ]


def _known_names(state_dict: Mapping[str, Any], saved_groups: Sequence[SavedGroup]) -> set[str]:
    return set(state_dict["state"]).union(*(saved.names for saved in saved_groups))


def _add_name(state_dict: dict[str, Any], name: str, other: str) -> None:
    """Give `name` a copy of what is saved of the parameter `other`."""
    for entries in (state_dict["state"], state_dict.get("parameters", {})):
        if other in entries:
            entries[name] = copy.deepcopy(entries[other])
    for group in state_dict["param_groups"]:
        if other in group["params"]:
            group["params"] = [*group["params"], name]


def _join_group(merged: dict[str, Any], by_options: dict[str, Any], saved: SavedGroup, names: list[str]) -> None:
    """Add the names to the group with the same options; `by_options` finds it without comparing all of them."""
    key = comparable(saved.options, _origin(saved))
    if key in by_options:
        by_options[key]["params"].extend(names)
        return
    by_options[key] = {**saved.options, "params": names}
    merged["param_groups"].append(by_options[key])
    merged["initial_options"].append(_origin(saved))


def _origin(saved: SavedGroup) -> dict[str, Any] | None:
    return saved.configured if saved.is_known else None


def _require_overlap(groups: Sequence[Group], known: set[str]) -> None:
    mine = [name for group in groups for name in group.parameters]
    if mine and known.isdisjoint(mine):
        raise CheckpointLoadError(
            f"The saved optimizer state has none of this optimizer's parameters. Here: {listed(mine, limit=3)}. In "
            f"the checkpoint: {listed(sorted(map(str, known)), limit=3)}. It belongs to another model, or the names "
            "got a prefix; skip the optimizer component to start it fresh."
        )


def _require_fit(group: Group, sources: Sequence[SavedGroup], state_dict: Mapping[str, Any]) -> None:
    """Raise unless the saved state belongs to parameters and an optimizer like this group's."""
    for name, parameter in group.parameters.items():
        record = state_dict.get("parameters", {}).get(name)
        for shape in saved_shapes(record, state_dict["state"].get(name, {})) - {tuple(parameter.shape)}:
            raise CheckpointLoadError(
                f"The saved optimizer state of {name!r} belongs to a parameter of shape {shape}, but its shape is "
                f"{tuple(parameter.shape)} now. Restore the model's configuration, or skip the optimizer component to "
                "start it fresh."
            )
        if record is not None and record["optimizer"] != group.optimizer_name:
            _require_same_kind(group, name, record["optimizer"], sources)


def _require_same_kind(group: Group, name: str, saved_class: str, sources: Sequence[SavedGroup]) -> None:
    """Accept another class (a wrapper, a drop-in) unless each side has options that the other lacks."""
    ours = set(group.configured)
    for source in sources:
        if name in source.names and ours - set(source.configured) and set(source.configured) - ours:
            raise CheckpointLoadError(
                f"The saved optimizer state of {name!r} was written by {saved_class}, and {group.optimizer_name} has "
                f"other options ({sorted(ours ^ set(source.configured))} are not in both), so it cannot use that "
                f"state. Go back to {saved_class}, or skip the optimizer component to start fresh."
            )


@torch.no_grad()
def _load_group_state(group: Group, state_dict: Mapping[str, Any]) -> None:
    for name, parameter in group.parameters.items():
        existing = group.state.pop(parameter, None)
        if saved := state_dict["state"].get(name):
            saved_dtype = state_dict.get("parameters", {}).get(name, {}).get("dtype")
            convert = partial(_converted, parameter=parameter, group=group, saved_dtype=saved_dtype)
            saved = with_number_tensors(saved, group.optimizer)
            group.state[parameter] = _placed(saved, existing, None, convert)


def _placed(value: object, existing: Any, key: object, convert: Callable[[Tensor, Any], Tensor]) -> object:
    """Put a loaded value into the tensor that the optimizer has for it, or let the value take its place."""
    if isinstance(value, Tensor):
        fits = isinstance(existing, Tensor) and existing.shape == value.shape
        return existing.copy_(value) if fits else convert(value, key)
    if isinstance(value, Mapping):
        inner = existing if isinstance(existing, Mapping) else {}
        return {k: _placed(v, inner.get(k), k, convert) for k, v in value.items()}
    return type(value)(_placed(v, None, None, convert) for v in value) if isinstance(value, list | tuple) else value


def _converted(value: Tensor, key: object, parameter: Tensor, group: Group, saved_dtype: str | None) -> Tensor:
    """Follow torch's policy for loaded state, without its loss of state kept in a dtype of the optimizer's choice.

    Torch gives all state the parameter's dtype. Here integers stay integers, and floating state follows the parameter
    only if it had its dtype when saved: float32 moments of a bfloat16 parameter have to come back bit for bit. Fused
    kernels read moments as if they had the parameter's dtype and order, so there those are what they get.
    """
    value = owned(value)
    if key == "step":
        if group.options.get("fused") or group.options.get("capturable"):
            return value.to(dtype=torch.float32, device=parameter.device)
        return value.cpu() if value.dtype in (torch.float32, torch.float64) else value.cpu().to(torch.float32)
    if is_fused(group.optimizer, group.options, key):
        moment = value.to(dtype=parameter.dtype, device=parameter.device)
        return moment if same_strides(moment, parameter) else torch.empty_like(parameter.detach()).copy_(moment)
    follows_parameter = value.is_floating_point() and parameter.is_floating_point()
    is_narrow = value.dtype.itemsize <= parameter.dtype.itemsize
    if follows_parameter and (saved_dtype in (None, str(value.dtype)) or (is_narrow and is_of_torch(group.optimizer))):
        return value.to(dtype=parameter.dtype, device=parameter.device)
    return value.to(device=parameter.device)
