"""Optimizer state by FQN (parameter name), independent of the order, grouping and sharding of the parameters.

Nothing is changed unless the full state fits. The checkpoint coordinator and the trainers wrap optimizers in
`OptimizerState`, which describes the format.
"""

import copy
import logging
import math
from collections import ChainMap, Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.checkpoint.files.mapped_files import TensorCopies
from forgather.ml.checkpoint.sharding.partition import parts_by_size
from forgather.ml.checkpoint.sharding.sharded_tensors import as_shard, is_sharded, local_part, rows_of
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
    ShardedUpdates,
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
from forgather.ml.checkpoint.state.update_precision import PreciseUpdates, adopted, dtype_of_update, log_change

logger = logging.getLogger(__name__)


class OptimizerState:
    """Stateful wrapper that saves and restores a torch optimizer by parameter name.

    `named_parameters` covers the full model, or chains the parameters of several stages. A tied parameter with several
    names is stored under the first. Create the wrapper together with the optimizer, because the current options count
    as the user's configuration. If training may have changed them already, pass `knows_configuration=False`: all
    options then follow the checkpoint. For an optimizer with sharded state (`ShardedUpdates`), only the parameters of
    this rank are saved and restored.

    The state dict has four entries:

    - `state`: name -> state of that parameter;
    - `param_groups`: current options of the groups, with names in `params`;
    - `initial_options`: options of the same groups as the user configured them. They distinguish a change by the user
      (which wins) from a change by a scheduler (which is restored);
    - `parameters`: name -> shape and dtype of the parameter, class of its optimizer, and keys of its state. They show
      whether a state fits and is complete.
    """

    def __init__(
        self,
        optimizer: OptimizerLike,
        named_parameters: Iterable[tuple[str, Tensor]],
        knows_configuration: bool = True,
    ) -> None:
        self._knows_configuration = knows_configuration
        sharded = optimizer if isinstance(optimizer, ShardedUpdates) else None
        self._owns: Callable[[Tensor], bool] = (lambda _: True) if sharded is None else sharded.owns
        optimizer = optimizer if sharded is None else sharded.optimizer
        wrapper = optimizer if isinstance(optimizer, PreciseUpdates) else None
        self._update_dtype = None if wrapper is None else wrapper.update_dtype
        self._precision_key = None if wrapper is None else wrapper.state_key
        self._optimizers = list(_elementary_optimizers(optimizer))
        self._names = _names_by_parameter(named_parameters)
        self._configured: dict[str, dict[str, Any]] = {}
        self._groups()

    @property
    def copies_loaded_tensors(self) -> bool:
        """Whether `load_state_dict` copies to accelerators or into existing state, so that a mapped file is enough."""
        on_devices = all(parameter.device.type not in ("cpu", "meta") for parameter in self._names)
        return on_devices or any(optimizer.state for optimizer in self._optimizers)

    @property
    def is_sharded(self) -> bool:
        """Whether this rank holds only rows of some parameters, so that it needs only rows of their state."""
        return any(map(is_sharded, self._names))

    @staticmethod
    def part_of_state(state: Mapping[str, Any], number: int, count: int) -> dict[str, Any]:
        """Return part `number` of `count` of a state: some of its parameters, with about the same number of elements."""
        sizes = {name: math.prod(record["shape"]) for name, record in state["parameters"].items()}
        parts = parts_by_size(sizes, count)
        own = {name for name, part in parts.items() if part == number}
        groups = [
            {**group, "params": [name for name in group["params"] if name in own]} for group in state["param_groups"]
        ]
        return {
            **state,
            "state": {name: one for name, one in state["state"].items() if name in own},
            "param_groups": groups,
            "parameters": {name: one for name, one in state["parameters"].items() if name in own},
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state by parameter name; its tensors are not copies."""
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
        """Restore the state by name; the optimizer may keep tensors of `state_dict`, so do not reuse them.

        Parameters without a saved state start fresh. Saved names that the optimizer does not have are ignored. Nothing
        is changed if the state does not fit.
        """
        # All groups are checked before the first is changed, so that an error leaves the optimizer as it was.
        self.check_state_dict(state_dict)
        groups, saved_groups = self._groups(), _saved_groups(state_dict)
        log_change(state_dict["state"].values(), self._precision_key)
        copies = TensorCopies()
        for group in groups:
            _load_group_state(group, state_dict, self._precision_key, copies)
            load_group_options(group, sources_of(group, saved_groups))
        copies.run()
        known = _known_names(state_dict, saved_groups)
        if fresh := [name for group in groups for name in group.parameters if name not in known]:
            logger.warning(
                "Parameters without optimizer state in the checkpoint, which starts fresh: %s", listed(fresh)
            )

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise `CheckpointLoadError` unless `load_state_dict` can use the state; nothing is changed.

        Each tensor must have a shape, dtype and memory layout that the optimizer accepts, and share no memory with
        another tensor. A fused kernel would read a wrong tensor out of bounds.
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
                # A new group has no `initial_lr` until a scheduler is attached; it is checked like `lr`.
                current = group.options.get(option, group.options.get("lr") if option == "initial_lr" else None)
                check_option(option, sources[0].options[option], current, group)
        checks.finish()

    def missing_names(self, state_dict: Mapping[str, Any]) -> list[str]:
        """Return the parameters of this optimizer that a state lacks; the state of another stage may have them."""
        check_structure(state_dict)
        known = _known_names(state_dict, _saved_groups(state_dict))
        return [name for group in self._groups() for name in group.parameters if name not in known]

    def add_tied_names(self, state_dict: dict[str, Any], sharing: Sequence[Sequence[str]]) -> None:
        """Copy saved states to missing names that were tied to a saved name (`sharing`: groups of tied names).

        A tied parameter is stored under its first name only, and a stage may have it under another name.
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
        """Merge the states of several ranks or stages; for a name in several parts (replicas) the first part wins."""
        merged: dict[str, Any] = {"state": {}, "param_groups": [], "initial_options": [], "parameters": {}}
        placed: set[str] = set()
        by_options: dict[str, Any] = {}
        for part in parts:
            check_structure(part)
            merged["state"] |= {name: state for name, state in part["state"].items() if name not in merged["state"]}
            merged["parameters"] = part.get("parameters", {}) | merged["parameters"]
            # Stages of one model usually have equal groups. Groups with equal options are joined, as in a single
            # process.
            for saved, group in zip(_saved_groups(part), part["param_groups"], strict=True):
                names = [name for name in group["params"] if name not in placed]
                placed.update(names)
                if names:
                    _join_group(merged, by_options, saved, names)
        return merged

    def _groups(self) -> list[Group]:
        """Return the current groups; record the options of new parameters as configured by the user."""
        # Rebuilt at each save and load, so that param groups added during training are included.
        groups: list[Group] = []
        for optimizer in self._optimizers:
            for index, options in enumerate(optimizer.param_groups):
                # Other ranks save the state of the parameters that they own.
                members = [parameter for parameter in options["params"] if self._owns(parameter)]
                names = [self._name(parameter, index, i) for i, parameter in enumerate(members)]
                configured = configured_options(options)
                for name in names:
                    self._configured.setdefault(name, configured)
                configured = self._configured[names[0]] if names else configured
                parameters = dict(zip(names, members, strict=True))
                known = self._knows_configuration
                state, wide = optimizer.state, self._update_dtype
                groups.append(Group(options, configured, state, parameters, optimizer, known, wide))
        counts = Counter(name for group in groups for name in group.parameters)
        if shared := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"Parameters in more than one optimizer cannot be stored by name: {listed(shared)}")
        return groups

    def _name(self, parameter: Tensor, group_index: int, index: int) -> str:
        if parameter not in self._names:
            raise ValueError(
                f"Parameter {index} of optimizer group {group_index}, of shape {tuple(parameter.shape)}, has no name: "
                "it is not in named_parameters. State is stored by name, so pass the named parameters of every module "
                "that this optimizer updates."
            )
        return self._names[parameter]

    def _refuse_state_of_no_parameter(self) -> None:
        for optimizer in self._optimizers:
            if others := [key for key in optimizer.state if not isinstance(key, Tensor)]:
                raise ValueError(
                    f"{type(optimizer).__name__} keeps state under {others[0]!r}, which is not a parameter, so it cannot "
                    "be stored by name. Keep it per parameter, or as an option of the param group."
                )


def _elementary_optimizers(optimizer: OptimizerLike) -> Iterator[OptimizerLike]:
    """Yield the optimizers that a composed optimizer consists of; reject optimizers that cannot be stored by name."""
    if isinstance(optimizer, PreciseUpdates):
        yield from _elementary_optimizers(optimizer.optimizer)
        return
    parts = getattr(optimizer, "optimizers", None)
    if parts is not None:
        for part in parts.values() if isinstance(parts, Mapping) else parts:
            yield from _elementary_optimizers(part)
        return
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            f"{name} cannot be stored by parameter name: it keeps one flat history for all parameters under the first "
            "parameter. Use a per-parameter optimizer, or omit the optimizer from the checkpoint."
        )
    if isinstance(optimizer.state, ChainMap) or optimizer.state is not optimizer.state:
        # Writes to such a view would be lost, or would reach the wrong optimizer behind it. A property that builds a
        # new dict for each access is such a view.
        raise ValueError(
            f"The state of {name} is a view of several optimizers and cannot be written to. List these optimizers in an "
            "attribute `optimizers`."
        )
    yield optimizer


def _names_by_parameter(named_parameters: Iterable[tuple[str, Tensor]]) -> dict[Tensor, str]:
    by_name: dict[str, Tensor] = {}
    names: dict[Tensor, str] = {}
    for name, parameter in named_parameters:
        if by_name.setdefault(name, parameter) is not parameter:
            raise ValueError(
                f"Two different parameters are both named {name!r}, of shapes {tuple(by_name[name].shape)} and "
                f"{tuple(parameter.shape)}. Stage modules must keep the names of the full model."
            )
        # The first name of a tied parameter is its stored name.
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
    # A parameter without a gradient so far has no state, but it is in a group.
    return set(state_dict["state"]).union(*(saved.names for saved in saved_groups))


def _add_name(state_dict: dict[str, Any], name: str, other: str) -> None:
    """Copy the saved entries of the parameter `other` to `name`."""
    # A deep copy, because no two parameters may share the memory of a state (`StateChecks.finish`).
    for entries in (state_dict["state"], state_dict.get("parameters", {})):
        if other in entries:
            entries[name] = copy.deepcopy(entries[other])
    for group in state_dict["param_groups"]:
        if other in group["params"]:
            group["params"] = [*group["params"], name]


def _join_group(merged: dict[str, Any], by_options: dict[str, Any], saved: SavedGroup, names: list[str]) -> None:
    """Add the names to the merged group with the same options; `by_options` is an index of the groups by options."""
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
    # A partial overlap is normal, for example after layers were added. No overlap at all is a wrong model or a prefix
    # in the names.
    mine = [name for group in groups for name in group.parameters]
    if mine and known.isdisjoint(mine):
        raise CheckpointLoadError.misfit(
            f"The saved optimizer state has none of this optimizer's parameters. Here: {listed(mine, limit=3)}. In "
            f"the checkpoint: {listed(sorted(map(str, known)), limit=3)}. It belongs to another model, or a prefix of "
            "the names has changed. Skip the optimizer component to start it fresh."
        )


def _require_fit(group: Group, sources: Sequence[SavedGroup], state_dict: Mapping[str, Any]) -> None:
    """Raise unless the saved state matches the shapes and the optimizer class of this group."""
    for name, parameter in group.parameters.items():
        record = state_dict.get("parameters", {}).get(name)
        for shape in saved_shapes(record, state_dict["state"].get(name, {})) - {tuple(parameter.shape)}:
            raise CheckpointLoadError.misfit(
                f"The saved optimizer state of {name!r} belongs to a parameter of shape {shape}, but its shape is "
                f"{tuple(parameter.shape)} now. Restore the model's configuration, or skip the optimizer component to "
                "start it fresh."
            )
        if record is not None and record["optimizer"] != group.optimizer_name:
            _require_same_kind(group, name, record["optimizer"], sources)


def _require_same_kind(group: Group, name: str, saved_class: str, sources: Sequence[SavedGroup]) -> None:
    """Raise if each of two optimizer classes has options that the other lacks; accept wrappers and drop-in classes."""
    ours = set(group.configured)
    for source in sources:
        if name in source.names and ours - set(source.configured) and set(source.configured) - ours:
            raise CheckpointLoadError.misfit(
                f"The saved optimizer state of {name!r} was written by {saved_class}. {group.optimizer_name} has "
                f"different options ({sorted(ours ^ set(source.configured))} are not in both) and cannot use that "
                f"state. Use {saved_class} again, or skip the optimizer component to start fresh."
            )


@torch.no_grad()
def _load_group_state(group: Group, state_dict: Mapping[str, Any], key: str | None, copies: TensorCopies) -> None:
    for name, parameter in group.parameters.items():
        # Removed first, so that a parameter without a saved state starts fresh.
        existing = group.state.pop(parameter, None)
        if saved := adopted(state_dict["state"].get(name, {}), parameter, key):
            saved_dtype = state_dict.get("parameters", {}).get(name, {}).get("dtype")
            convert = partial(
                _converted_rows if is_sharded(parameter) else _converted,
                parameter=parameter,
                group=group,
                saved_dtype=saved_dtype,
            )
            state = with_number_tensors(saved, group.optimizer)
            group.state[parameter] = _placed(state, existing, None, convert, copies)


def _placed(
    value: object, existing: Any, key: object, convert: Callable[[Tensor, Any], Tensor], copies: TensorCopies
) -> object:
    """Note the copy of a loaded value into the existing tensor of the optimizer, or return the converted value."""
    if isinstance(value, Tensor):
        # An existing tensor already has the dtype, device and layout that the optimizer wants.
        if not isinstance(existing, Tensor) or existing.shape != value.shape:
            return convert(value, key)
        copies.add(existing, value)
        return existing
    if isinstance(value, Mapping):
        inner = existing if isinstance(existing, Mapping) else {}
        return {k: _placed(v, inner.get(k), k, convert, copies) for k, v in value.items()}
    placed = partial(_placed, existing=None, key=None, convert=convert, copies=copies)
    return type(value)(map(placed, value)) if isinstance(value, list | tuple) else value


def _converted_rows(value: Tensor, key: object, parameter: Tensor, group: Group, saved_dtype: str | None) -> Tensor:
    """Convert the rows of a sharded parameter in a loaded state tensor; other tensors are converted as a whole."""
    local = local_part(parameter)
    if value.shape != parameter.shape:
        return _converted(value, key, local, group, saved_dtype)
    shard: Tensor = as_shard(_converted(rows_of(value, parameter), key, local, group, saved_dtype), parameter)
    return shard


def _converted(value: Tensor, key: object, parameter: Tensor, group: Group, saved_dtype: str | None) -> Tensor:
    """Convert a loaded state tensor to the device of the parameter, and to its dtype where that loses no precision.

    Torch casts all state to the dtype of a floating-point parameter. Here integer state stays integer. Floating state
    follows the parameter if both had the same dtype when saved, or if it is not wider and the optimizer is torch's own.
    So float32 moments of a bfloat16 parameter are restored bit for bit. Fused kernels assume the dtype and layout of the
    parameter, so their moments are converted to both. If updates run in a wider dtype, that dtype counts as the dtype of
    the parameter.
    """
    value, dtype = owned(value), dtype_of_update(parameter, group.update_dtype)
    if key == "step":
        # As in torch: fused and capturable optimizers read the step on the device, other optimizers on the CPU.
        if group.options.get("fused") or group.options.get("capturable"):
            return value.to(dtype=torch.float32, device=parameter.device)
        return value.cpu() if value.dtype in (torch.float32, torch.float64) else value.cpu().to(torch.float32)
    if is_fused(group.optimizer, group.options, key):
        moment = value.to(dtype=dtype, device=parameter.device)
        if same_strides(moment, parameter):
            return moment
        return torch.empty_like(parameter.detach(), dtype=dtype).copy_(moment)
    follows_parameter = value.is_floating_point() and parameter.is_floating_point()
    is_narrow = value.dtype.itemsize <= dtype.itemsize
    if follows_parameter and (saved_dtype in (None, str(value.dtype)) or (is_narrow and is_of_torch(group.optimizer))):
        return value.to(dtype=dtype, device=parameter.device)
    return value.to(device=parameter.device)
