"""ZeRO-1: optimizer state sharded over data-parallel ranks (`ddp.shard_optimizer`).

Every rank owns some parameters. It keeps only their moments, updates only them, and broadcasts them after the step.
Gradients are complete on all ranks, so norm, clipping and GradScaler need no change. `DDPTrainer` wraps the optimizer.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from forgather.ml.checkpoint.state.optimizer_options import comparable, options_of
from forgather.ml.trainer.ddp.parameter_broadcast import ParameterBroadcast
from forgather.ml.trainer.loop.nonfinite import elementary_optimizers

_FLAGS_OF_SCALER = ("grad_scale", "found_inf")
"""Attributes that GradScaler sets on an optimizer for a step, with tensors on the device."""


def assign_owners(sizes: Mapping[str, int], loads: list[int]) -> dict[str, int]:
    """Return the owner of each parameter by name: the largest first, each to the rank with the least bytes so far.

    `loads` has the bytes of each rank, and is updated. The result does not depend on the order of `sizes`.
    """
    owners = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += sizes[name]
    return owners


class ShardedOptimizer(Optimizer):
    """Optimizer that updates the parameters of its rank and receives the others from their owners.

    It wraps any optimizer that updates each parameter from its own gradient, state and options. `param_groups` has all
    parameters, so that schedules, gradient norms and `zero_grad` work as without sharding. Only in a step the groups
    of the wrapped optimizer are reduced to the parameters of this rank; so it has no state for the others.
    """

    def __init__(self, optimizer: Any, names: Mapping[Tensor, str], group: ProcessGroup) -> None:
        # Torch's own constructor would make new groups and a new state.
        super().__setstate__({"defaults": dict(getattr(optimizer, "defaults", {}))})
        self.optimizer = optimizer
        self._names = names
        self._group = group
        self._rank = dist.get_rank(group)
        self._loads = [0] * dist.get_world_size(group)
        self._owners: dict[Tensor, int] = {}
        self._has_stepped = False
        self._assign()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    @property
    def state(self) -> MutableMapping[Tensor, Any]:  # type: ignore[override]
        """State of the parameters of this rank."""
        state: MutableMapping[Tensor, Any] = self.optimizer.state
        return state

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return bool(getattr(self.optimizer, "_step_supports_amp_scaling", False))

    def owns(self, parameter: Tensor) -> bool:
        """Return whether this rank updates the parameter."""
        return self._owners.get(parameter) == self._rank

    def owner_by_name(self) -> dict[str, int]:
        return {self._names[parameter]: owner for parameter, owner in self._owners.items()}

    def options_of_groups(self) -> list[str | None]:
        """Return the options of each group as text, or None for a group without a parameter of this rank."""
        return [
            comparable(options_of(group)) if any(map(self.owns, group["params"])) else None
            for group in self.param_groups
        ]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if sum(len(group["params"]) for group in self.param_groups) != len(self._owners):
            # A callback has added parameters to a group, for instance to unfreeze layers.
            self._assign()
        with self._own_groups(), self._scaler_flags(), self._watching_others():
            self.optimizer.step()
        self.broadcast()
        return loss

    def broadcast(self) -> None:
        """Give all ranks the parameters of their owners; collective."""
        self._broadcast.run()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, with the moments of this rank only; checkpoints use `OptimizerState`."""
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def _assign(self) -> None:
        """Give each parameter without an owner to a rank, and drop state of other ranks' parameters."""
        parameters = {self._name(one): one for group in self.param_groups for one in group["params"]}
        new = {name: one.nbytes for name, one in parameters.items() if one not in self._owners}
        for name, owner in assign_owners(new, self._loads).items():
            self._owners[parameters[name]] = owner
        by_owner: list[list[Tensor]] = [[] for _ in self._loads]
        for parameter, owner in self._owners.items():
            by_owner[owner].append(parameter)
        self._broadcast = ParameterBroadcast(by_owner, self._group)
        # Some optimizers create state in their constructor.
        for part in elementary_optimizers(self.optimizer):
            for parameter in [one for one in part.state if one in self._owners and not self.owns(one)]:
                del part.state[parameter]

    def _name(self, parameter: Tensor) -> str:
        if parameter not in self._names:
            raise ValueError(
                f"The optimizer has a parameter of shape {tuple(parameter.shape)} that is not in the model, so "
                "ddp.shard_optimizer=True cannot choose a rank for it by its name. Build the optimizer from the parameters "
                "of the model, or set ddp.shard_optimizer=False."
            )
        return self._names[parameter]

    @contextlib.contextmanager
    def _own_groups(self) -> Iterator[None]:
        """Reduce the groups of the wrapped optimizer to the parameters of this rank."""
        groups = [(group, group["params"]) for group in self.param_groups]
        try:
            for group, members in groups:
                group["params"] = [one for one in members if self.owns(one)]
            yield
        finally:
            for group, members in groups:
                group["params"] = members

    @contextlib.contextmanager
    def _scaler_flags(self) -> Iterator[None]:
        """Pass on the tensors of GradScaler. It looked at all gradients, so they are equal on all ranks."""
        flags = {name: vars(self)[name] for name in _FLAGS_OF_SCALER if name in vars(self)}
        vars(self.optimizer).update(flags)
        try:
            yield
        finally:
            for name in flags:
                delattr(self.optimizer, name)

    @contextlib.contextmanager
    def _watching_others(self) -> Iterator[None]:
        """Raise ValueError if the first step updates parameters of other ranks."""
        if self._has_stepped:
            yield
            return
        self._has_stepped = True
        others = [(one, one._version) for one in self._owners if not self.owns(one)]
        yield
        if any(one._version != version for one, version in others):
            raise ValueError(
                f"ddp.shard_optimizer=True cannot be used with {type(self.optimizer).__name__}: it keeps references to the "
                "parameters outside of its param_groups, and updated parameters of other ranks. Use an optimizer that "
                "reads its param_groups in every step, or set ddp.shard_optimizer=False."
            )


def require_equal_owners(by_rank: Sequence[Mapping[str, int]]) -> None:
    """Raise ValueError unless all ranks have optimizers of the same parameters."""
    for rank, owners in enumerate(by_rank):
        if different := sorted(owners.items() ^ by_rank[0].items()):
            raise ValueError(
                f"ddp.shard_optimizer=True needs an optimizer of the same parameters on every rank, but rank {rank} and rank 0 "
                f"differ, first in {different[0][0]!r}. Build the same optimizer on all ranks."
            )


def require_equal_options(by_rank: Sequence[Sequence[str | None]]) -> None:
    """Raise ValueError if ranks have different options of a group, which the optimizer's step has changed."""
    for number, options in enumerate(zip(*by_rank, strict=True)):
        if len(found := {one for one in options if one is not None}) > 1:
            raise ValueError(
                f"The options of optimizer group {number} differ between ranks: {' and '.join(sorted(found)[:2])}. With "
                "ddp.shard_optimizer=True, each rank updates some parameters only, so an optimizer that computes options "
                "from all parameters (such as Prodigy) trains differently. Use an optimizer that updates each parameter "
                "separately, or set ddp.shard_optimizer=False."
            )
