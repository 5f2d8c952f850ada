"""EMA: exponential moving average of the weights, which often evaluates better than the last weights.

Averages have at least float32 precision and are saved by parameter name, so they load under another topology.
`Recipes` updates them after each optimizer step. Evaluation and `save_model` can swap them into the model.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.checkpoint.files.mapped_files import TensorCopies
from forgather.ml.checkpoint.sharding.partition import parts_by_size
from forgather.ml.checkpoint.sharding.sharded_tensors import as_shard, is_sharded, local_part, rows_of
from forgather.ml.checkpoint.state.tensor_checks import (
    OwnStorage,
    Where,
    check_mapping,
    check_sharing,
    check_tensor,
    described,
    owned,
)

logger = logging.getLogger(__name__)

_COPIED_AT_ONCE = 2**24
"""Number of low-precision elements that are copied to float32 at a time."""


class WeightAverage:
    """EMA of trainable parameters by name; an update sets average = decay * average + (1 - decay) * parameter.

    Averages are at least float32, because lower precision would lose their small updates. A tied parameter is stored
    under its first name. Buffers are not averaged.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        decay: float,
        precise: Callable[[Tensor], Tensor | None] | None = None,
    ) -> None:
        """Average the given parameters; where `precise` returns a master weight for a parameter, average that instead."""
        self.decay = decay
        self._master = precise or (lambda _: None)
        self.is_begun = False
        self.is_in_model = False
        self._parameters: dict[str, nn.Parameter] = {}
        seen: set[nn.Parameter] = set()
        for name, parameter in named_parameters:
            if parameter.requires_grad and parameter not in seen:
                seen.add(parameter)
                self._parameters[name] = parameter
        self._averages: dict[str, Tensor] = {}
        self._portions = _portions(self._parameters)

    def begin(self) -> None:
        """Initialise the averages with the current weights, unless a state was loaded."""
        if not self.is_begun:
            self._averages = {name: _precise(one).clone() for name, one in self._parameters.items()}
        self.is_begun = True

    def tensors(self) -> list[Tensor]:
        return list(self._averages.values())

    def forget(self) -> None:
        """Let the next `begin` initialise the averages again, unless a state is loaded before."""
        self.is_begun = False

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages with the current weights."""
        for names in self._portions:
            # Shards are updated without DTensor, which would plan each operation again.
            values = [local_part(self._value(self._parameters[name])) for name in names]
            # One fused kernel for all tensors of a group. lerp(average, value, 1 - decay) is the EMA update.
            torch._foreach_lerp_([local_part(self._averages[name]) for name in names], values, 1.0 - self.decay)

    def _value(self, parameter: Tensor) -> Tensor:
        master = self._master(parameter)
        return _precise(parameter if master is None else master)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Swap the averages into the parameters in this context; nested contexts change nothing."""
        if self.is_in_model:
            yield
            return
        # Low-precision parameters cannot be swapped: they would round the float32 average. Their values are copied.
        kept = {
            name: parameter.detach().clone() for name, parameter in self._parameters.items() if _is_short(parameter)
        }
        self._exchange(kept)
        self.is_in_model = True
        try:
            yield
        finally:
            self._exchange(kept, back=True)
            self.is_in_model = False

    @torch.no_grad()
    def _exchange(self, kept: Mapping[str, Tensor], back: bool = False) -> None:
        for name, parameter in self._parameters.items():
            average = self._averages[name]
            if name in kept:
                parameter.copy_(kept[name] if back else average)
                continue
            # Swap tensor by tensor: this takes the memory of one tensor instead of a second model.
            value = parameter.clone()
            parameter.copy_(average)
            average.copy_(value)

    # --- state by name

    @property
    def copies_loaded_tensors(self) -> bool:
        """Whether `load_state_dict` copies to accelerators or existing averages, so that a mapped file is enough."""
        return bool(self._averages) or all(
            parameter.device.type not in ("cpu", "meta") for parameter in self._parameters.values()
        )

    @property
    def is_sharded(self) -> bool:
        """Whether this rank holds only rows of some averages, so that it needs only rows of a saved state."""
        return any(map(is_sharded, self._parameters.values()))

    @staticmethod
    def part_of_state(state: Mapping[str, Any], number: int, count: int) -> dict[str, Any]:
        """Return part `number` of `count` of a state: some of the averages, with about the same number of elements."""
        averages = state["averages"]
        parts = parts_by_size({name: average.numel() for name, average in averages.items()}, count)
        return {"averages": {name: average for name, average in averages.items() if parts[name] == number}}

    def state_dict(self) -> dict[str, Any]:
        return {"averages": dict(self._averages)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.check_state_dict(state_dict)
        saved = state_dict["averages"]
        missing = self.missing_names(state_dict)
        if missing:
            logger.warning(
                "The checkpoint has no average of %s: it starts from the current weights.", ", ".join(missing)
            )
        copies = TensorCopies()
        self._averages = {
            name: self._restored(name, saved[name], copies) if name in saved else _precise(parameter).clone()
            for name, parameter in self._parameters.items()
        }
        copies.run()
        self.is_begun = True

    def _restored(self, name: str, saved: Tensor, copies: TensorCopies) -> Tensor:
        """Return the existing average with a noted copy of the saved values, or a new average."""
        parameter, existing = self._parameters[name], self._averages.get(name)
        if existing is None or existing.device != parameter.device:
            return _like(saved, parameter)
        copies.add(existing, saved)
        return existing

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise `CheckpointLoadError` unless `load_state_dict` can use the state; change nothing."""
        saved, own = _saved_averages(state_dict), OwnStorage()
        for name, parameter in self._parameters.items():
            if name in saved:
                where = Where(f"the average of {name!r}", "ema")
                _check_average(saved[name], parameter, name, where)
                own.add(saved[name], where)
        own.check()

    def missing_names(self, state_dict: Mapping[str, Any]) -> list[str]:
        """Return the names of parameters without an entry in a state; the state of another stage may have them."""
        saved = _saved_averages(state_dict)
        return [name for name in self._parameters if name not in saved]

    def add_tied_names(self, state_dict: dict[str, Any], sharing: Sequence[Sequence[str]]) -> None:
        """Add missing names of parameters that were tied when saved, with a copy of the average of a tied parameter."""
        missing, saved = self.missing_names(state_dict), state_dict["averages"]
        check_sharing(sharing, Where("the parameters of the checkpoint", "ema"))
        for name in missing:
            others = [other for group in sharing if name in group for other in group if other in saved]
            # A copy, because the parameters are not tied any more and their averages must not share memory.
            if others:
                saved[name] = saved[others[0]].clone()

    @staticmethod
    def merge_state_dicts(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Merge the states of several ranks; for a name in several states (replicas) the first state counts."""
        merged: dict[str, Any] = {}
        for part in parts:
            merged = {**_saved_averages(part), **merged}
        return {"averages": merged}


def _saved_averages(state_dict: object) -> Mapping[str, Tensor]:
    """Return the averages of a loaded state; raise `CheckpointLoadError` unless they are tensors by name."""
    where = Where("the saved averages of the weights", "ema")
    averages = check_mapping(check_mapping(state_dict, where).get("averages"), where.at("averages"))
    for name, average in averages.items():
        if not isinstance(average, Tensor):
            raise where.at(name).refusal(f"is {described(average)}", "a tensor")
    return averages


def _check_average(average: Tensor, parameter: Tensor, name: str, where: Where) -> None:
    if average.shape != parameter.shape:
        raise CheckpointLoadError(
            f"The averaged weights of {name!r} have the shape {tuple(average.shape)}, but it is "
            f"{tuple(parameter.shape)} now. Restore the model's configuration, or restart the average with "
            'skip_checkpoint_components=["ema"].'
        )
    check_tensor(average, where, kind="complex" if parameter.is_complex() else "floating", like=parameter)


def _portions(parameters: Mapping[str, Tensor]) -> list[list[str]]:
    """Return groups of names that are updated together."""
    # Full-precision parameters form one group. Low-precision parameters need a float32 copy for the update, so their
    # groups are limited to `_COPIED_AT_ONCE` elements.
    portions: list[list[str]] = [[name for name, one in parameters.items() if not _is_short(one)]]
    room = 0
    for name, one in parameters.items():
        if _is_short(one):
            if one.numel() > room:
                portions.append([])
                room = _COPIED_AT_ONCE
            portions[-1].append(name)
            room -= one.numel()
    return [names for names in portions if names]


def _is_short(parameter: Tensor) -> bool:
    return torch.promote_types(parameter.dtype, torch.float32) != parameter.dtype


def _precise(parameter: Tensor) -> Tensor:
    return parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32))


def _like(average: Tensor, parameter: Tensor) -> Tensor:
    if is_sharded(parameter):
        shard: Tensor = as_shard(_like(rows_of(average, parameter), local_part(parameter)), parameter)
        return shard
    return owned(average).to(device=parameter.device, dtype=torch.promote_types(parameter.dtype, torch.float32))
