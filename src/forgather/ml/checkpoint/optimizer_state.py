"""Optimizer state by parameter name, so that it survives another order, grouping or split of the parameters.

What a state dict holds:

- `state`: name -> what the optimizer remembers about that parameter;
- `param_groups`: the groups' options as they are now, `params` being names;
- `initial_options`: the options of the same groups as the user configured them, to tell a user's change (which wins)
  from what a scheduler did (which is restored);
- `parameters`: name -> shape and dtype of the parameter and the class of its optimizer, to judge whether a state fits.
"""

import copy
import logging
from collections import ChainMap, Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from forgather.ml.checkpoint.errors import CheckpointLoadError

logger = logging.getLogger(__name__)

# Entries of a group that are no options: the parameters, and torch's own list of their names.
_NOT_OPTIONS = frozenset({"params", "param_names"})

# How this machine computes the update, not what the update is.
_MACHINE_OPTIONS = frozenset({"foreach", "fused", "capturable"})

# State that has one element per element of the parameter; consulted only when the parameter's shape is not recorded.
_ELEMENTWISE_STATE = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "variance", "sum", "ax"}
)


class OptimizerLike(Protocol):
    """What is needed of an optimizer; one made of several also lists them as `optimizers`."""

    @property
    def state(self) -> MutableMapping[Any, Any]: ...

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


@dataclass(frozen=True)
class _Group:
    """A group of the running optimizer; `options` and `state` are the optimizer's own."""

    options: dict[str, Any]
    configured: dict[str, Any]
    state: MutableMapping[Any, Any]
    parameters: dict[str, Tensor]
    optimizer_name: str
    is_known: bool
    """Whether `configured` is what the user asked for, or only what was found."""

    def __str__(self) -> str:
        return f"the group of {_listed(list(self.parameters), limit=2)}"


@dataclass(frozen=True)
class _SavedGroup:
    """A group of the checkpoint: its options when saved, as configured, and the names of its parameters."""

    options: dict[str, Any]
    configured: dict[str, Any]
    names: frozenset[str]
    is_known: bool


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
            "state": {name: _detached(group.state[p]) for name, p, group in named if group.state.get(p)},
            "param_groups": [{**_options(group.options), "params": list(group.parameters)} for group in groups],
            "initial_options": [dict(group.configured) if group.is_known else None for group in groups],
            "parameters": {
                name: {"shape": list(p.shape), "dtype": str(p.dtype), "optimizer": group.optimizer_name}
                for name, p, group in named
            },
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore by name; the tensors of `state_dict` may become the optimizer's own, so hand over ones you own.

        Parameters the checkpoint does not know start fresh, its other names are ignored. Nothing is changed when the
        state does not fit.
        """
        groups = self._groups()
        saved_groups = _saved_groups(state_dict)
        known = _known_names(state_dict, saved_groups)
        _require_overlap(groups, known)
        sources = [[saved for saved in saved_groups if saved.names & set(group.parameters)] for group in groups]
        for group, group_sources in zip(groups, sources, strict=True):
            _require_fit(group, group_sources, state_dict)
        for group, group_sources in zip(groups, sources, strict=True):
            _load_group_state(group, state_dict)
            _load_group_options(group, group_sources)
        if fresh := [name for group in groups for name in group.parameters if name not in known]:
            logger.warning("The checkpoint lacks parameters whose optimizer state starts fresh: %s", _listed(fresh))

    def missing_names(self, state_dict: Mapping[str, Any]) -> list[str]:
        """The parameters of this optimizer that a state does not know: another stage's state may."""
        known = _known_names(state_dict, _saved_groups(state_dict))
        return [name for group in self._groups() for name in group.parameters if name not in known]

    def add_tied_names(self, state_dict: dict[str, Any], sharing: Sequence[Sequence[str]]) -> None:
        """Let parameters here that were tied to others when saved (`sharing`: groups of names) find those others' state.

        A tied parameter is stored under its first name alone, and a stage may have it under another.
        """
        known = _known_names(state_dict, _saved_groups(state_dict))
        for name in self.missing_names(state_dict):
            others = [other for group in sharing if name in group for other in group if other in known]
            if others:
                _add_name(state_dict, name, others[0])

    @staticmethod
    def merge_state_dicts(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Join the states of several ranks or stages; of a name in several parts (replicas) the first one counts."""
        merged: dict[str, Any] = {"state": {}, "param_groups": [], "initial_options": [], "parameters": {}}
        placed: set[str] = set()
        for part in parts:
            merged["state"] |= {name: state for name, state in part["state"].items() if name not in merged["state"]}
            merged["parameters"] = part.get("parameters", {}) | merged["parameters"]
            for saved, group in zip(_saved_groups(part), part["param_groups"], strict=True):
                names = [name for name in group["params"] if name not in placed]
                placed.update(names)
                if names:
                    _join_group(merged, saved, names)
        return merged

    def _groups(self) -> list[_Group]:
        """The optimizer's groups as they are now; the options of parameters not seen before are noted as the user's."""
        groups: list[_Group] = []
        for optimizer in self._optimizers:
            for index, options in enumerate(optimizer.param_groups):
                names = [self._name(parameter, index, i) for i, parameter in enumerate(options["params"])]
                configured = _configured_options(options)
                for name in names:
                    self._configured.setdefault(name, configured)
                configured = self._configured[names[0]] if names else configured
                parameters = dict(zip(names, options["params"], strict=True))
                name, known = type(optimizer).__name__, self._knows_configuration
                groups.append(_Group(options, configured, optimizer.state, parameters, name, known))
        counts = Counter(name for group in groups for name in group.parameters)
        if shared := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"Updated by several optimizers, so which state is theirs is unclear: {_listed(shared)}")
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


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {option: _detached(value) for option, value in group.items() if option not in _NOT_OPTIONS}


def _configured_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options as the user set them; a scheduler that is attached already left the user's rate in `initial_lr`."""
    # Copies, because schedulers change a learning rate that is a tensor in place.
    configured = copy.deepcopy(_options(group))
    if "initial_lr" in configured:
        configured["lr"] = configured.pop("initial_lr")
    return configured


def _saved_groups(state_dict: Mapping[str, Any]) -> list[_SavedGroup]:
    if "state" not in state_dict or "param_groups" not in state_dict:
        raise CheckpointLoadError(
            f"Not an optimizer state: it holds {sorted(map(str, state_dict))} instead of state and param_groups."
        )
    groups = state_dict["param_groups"]
    configured = state_dict.get("initial_options") or [None for _ in groups]
    return [
        _SavedGroup(
            options=_options(group),
            configured=_configured_options(group) if origin is None else origin,
            names=frozenset(group["params"]),
            is_known=origin is not None,
        )
        for group, origin in zip(groups, configured, strict=True)
    ]


def _known_names(state_dict: Mapping[str, Any], saved_groups: Sequence[_SavedGroup]) -> set[str]:
    return set(state_dict["state"]).union(*(saved.names for saved in saved_groups))


def _add_name(state_dict: dict[str, Any], name: str, other: str) -> None:
    """Give `name` a copy of what is saved of the parameter `other`."""
    for entries in (state_dict["state"], state_dict.get("parameters", {})):
        if other in entries:
            entries[name] = copy.deepcopy(entries[other])
    for group in state_dict["param_groups"]:
        if other in group["params"]:
            group["params"] = [*group["params"], name]


def _join_group(merged: dict[str, Any], saved: _SavedGroup, names: list[str]) -> None:
    for group, configured in zip(merged["param_groups"], merged["initial_options"], strict=True):
        if _equal(_options(group), saved.options) and _equal(configured, _origin(saved)):
            group["params"].extend(names)
            return
    merged["param_groups"].append({**saved.options, "params": names})
    merged["initial_options"].append(_origin(saved))


def _origin(saved: _SavedGroup) -> dict[str, Any] | None:
    return saved.configured if saved.is_known else None


def _require_overlap(groups: Sequence[_Group], known: set[str]) -> None:
    mine = [name for group in groups for name in group.parameters]
    if mine and known.isdisjoint(mine):
        raise CheckpointLoadError(
            f"The saved optimizer state has none of this optimizer's parameters. Here: {_listed(mine, limit=3)}. In "
            f"the checkpoint: {_listed(sorted(map(str, known)), limit=3)}. It belongs to another model, or the names "
            "got a prefix; skip the optimizer component to start it fresh."
        )


def _require_fit(group: _Group, sources: Sequence[_SavedGroup], state_dict: Mapping[str, Any]) -> None:
    """Raise unless the saved state belongs to parameters and an optimizer like this group's."""
    for name, parameter in group.parameters.items():
        record = state_dict.get("parameters", {}).get(name)
        for shape in _saved_shapes(record, state_dict["state"].get(name, {})) - {tuple(parameter.shape)}:
            raise CheckpointLoadError(
                f"The saved optimizer state of {name!r} belongs to a parameter of shape {shape}, but its shape is "
                f"{tuple(parameter.shape)} now. Restore the model's configuration, or skip the optimizer component to "
                "start it fresh."
            )
        if record is not None and record["optimizer"] != group.optimizer_name:
            _require_same_kind(group, name, record["optimizer"], sources)


def _saved_shapes(record: Mapping[str, Any] | None, state: Mapping[str, Any]) -> set[tuple[int, ...]]:
    """The shape that a parameter had when its state was saved, or what the state tells about it.

    Optimizers shape their state as they like (factored, quantised, low rank), so only the recorded shape is proof;
    without a record, state known to be elementwise stands in for it. No state fits every shape.
    """
    if record is not None:
        return {tuple(record["shape"])} if state else set()
    elementwise = [value for key, value in state.items() if key in _ELEMENTWISE_STATE and isinstance(value, Tensor)]
    return {tuple(value.shape) for value in elementwise if value.ndim > 0}


def _require_same_kind(group: _Group, name: str, saved_class: str, sources: Sequence[_SavedGroup]) -> None:
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
def _load_group_state(group: _Group, state_dict: Mapping[str, Any]) -> None:
    for name, parameter in group.parameters.items():
        existing = group.state.pop(parameter, None)
        if saved := state_dict["state"].get(name):
            saved_dtype = state_dict.get("parameters", {}).get(name, {}).get("dtype")
            convert = partial(_converted, parameter=parameter, options=group.options, saved_dtype=saved_dtype)
            group.state[parameter] = _placed(saved, existing, None, convert)


def _placed(value: Any, existing: Any, key: Any, convert: Callable[[Tensor, Any], Tensor]) -> Any:
    """Put a loaded value into the tensor that the optimizer has for it, or let the value take its place."""
    if isinstance(value, Tensor):
        fits = isinstance(existing, Tensor) and existing.shape == value.shape
        return existing.copy_(value) if fits else convert(value, key)
    if isinstance(value, Mapping):
        inner = existing if isinstance(existing, Mapping) else {}
        return {k: _placed(v, inner.get(k), k, convert) for k, v in value.items()}
    return type(value)(_placed(v, None, None, convert) for v in value) if isinstance(value, list | tuple) else value


def _converted(
    value: Tensor, key: Any, parameter: Tensor, options: Mapping[str, Any], saved_dtype: str | None
) -> Tensor:
    """Follow torch's policy for loaded state, without its loss of state kept in a dtype of the optimizer's choice.

    Torch gives all state the parameter's dtype. Here integers stay integers, and floating state follows the parameter
    only if it had its dtype when saved: float32 moments of a bfloat16 parameter have to come back bit for bit.
    """
    if key == "step":
        if options.get("fused") or options.get("capturable"):
            return value.to(dtype=torch.float32, device=parameter.device)
        return value.cpu()
    follows_parameter = value.is_floating_point() and parameter.is_floating_point()
    if follows_parameter and saved_dtype in (None, str(value.dtype)):
        return value.to(dtype=parameter.dtype, device=parameter.device)
    return value.to(device=parameter.device)


def _load_group_options(group: _Group, sources: Sequence[_SavedGroup]) -> None:
    restored = [option for option in _common_options(group, sources) if _is_restored(option, group, sources)]
    if "lr" in restored and all("initial_lr" in source.options for source in sources):
        # The two belong together: a scheduler built later would take the decayed rate for the configured one.
        restored.append("initial_lr")
    for option in restored:
        group.options[option] = _adapted(sources[0].options[option], group.options.get(option))


def _common_options(group: _Group, sources: Sequence[_SavedGroup]) -> list[str]:
    """The options both sides have, and those that came up while training (absent from what was configured)."""
    if not sources:
        return []
    common = set.intersection(*(set(source.options) for source in sources))
    came_up = common.difference(*(source.configured for source in sources))
    return sorted(((common & set(group.options)) | came_up) - _MACHINE_OPTIONS - {"initial_lr"})


def _is_restored(option: str, group: _Group, sources: Sequence[_SavedGroup]) -> bool:
    """Whether an option follows the checkpoint: its groups agree on it, and the user has not changed it since."""
    values = [source.options[option] for source in sources]
    origins = [source.configured.get(option, source.options[option]) for source in sources]
    if not all(_equal(one, values[0]) for one in values) or not all(_equal(one, origins[0]) for one in origins):
        logger.warning(
            "Optimizer option %r of %s stays %s: the checkpoint has these parameters in %d groups that differ in it.",
            *(option, group, group.options.get(option), len(sources)),
        )
        return False
    now = group.configured.get(option, origins[0])
    if not group.is_known or not all(source.is_known for source in sources):
        return True
    if not _equal(now, origins[0]):
        logger.info(
            "Optimizer option %r of %s was configured as %s for the checkpoint and as %s now; the new value is used.",
            *(option, group, _plain(origins[0]), _plain(now)),
        )
        return False
    return True


def _adapted(value: Any, current: Any) -> Any:
    """Give a restored option the form it has now: compiled optimizers hold on to a learning rate that is a tensor."""
    if isinstance(current, Tensor):
        with torch.no_grad():
            return current.copy_(torch.as_tensor(value))
    if isinstance(value, Tensor) and current is not None:
        return value.tolist()
    return tuple(value) if isinstance(current, tuple) and isinstance(value, list) else value


def _detached(value: Any) -> Any:
    """The same value in containers of our own, its tensors sharing memory but without a graph."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {key: _detached(inner) for key, inner in value.items()}
    return type(value)(map(_detached, value)) if isinstance(value, list | tuple) else value


def _plain(value: Any) -> Any:
    """A form that compares and prints alike whether it holds tensors or numbers, tuples or lists."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _equal(one: Any, other: Any) -> bool:
    return bool(_plain(one) == _plain(other))


def _listed(names: Sequence[str], limit: int = 20) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
