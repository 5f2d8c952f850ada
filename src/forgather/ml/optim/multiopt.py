"""Multiopt: several optimizers that act as one torch optimizer.

Created by `make_grouped_optimizer` when parameter groups have different factories. It keeps no groups or state itself,
so schedules and checkpoints always see those held by the inner optimizers.
"""

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Multiopt(Optimizer):
    """Optimizer that steps several optimizers together, for instance one for matrices and another for the rest.

    It has no groups and no state itself: `param_groups` and `state` are views of `optimizers`. A schedule therefore
    acts on all of them, even after `load_state_dict`, which makes torch replace the group dicts.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        parts = list(optimizers)
        _refuse_unusable(parts)
        # Skip torch's constructor, which would create separate groups and state; `__setstate__` does the rest of its
        # work.
        self.__setstate__({"optimizers": parts, "defaults": _common_defaults(parts)})

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizers": self.optimizers, "defaults": self.defaults}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.optimizers: list[Optimizer] = state["optimizers"]
        self._groups: list[dict[str, Any]] = []
        super().__setstate__(state)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Group dicts of all optimizers, in a list that is always the same object."""
        # Refilled in place, so that callers who kept the list see groups that a loaded state replaced.
        self._groups[:] = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return self._groups

    @property
    def state(self) -> MutableMapping[Tensor, Any]:  # type: ignore[override]
        """State of all optimizers by parameter; writes go to the optimizer that owns the parameter."""
        return _StateOfAll(self.optimizers)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step each optimizer; evaluate a closure once for all of them."""
        loss = None
        # Passing the closure on would run the forward and backward pass once per optimizer.
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ValueError("Multiopt cannot choose an optimizer for a new group: add the group to one of `optimizers`.")

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        states = state_dict.get("optimizers")
        if states is None or len(states) != len(self.optimizers):
            found = f"the states of {len(states)}" if states is not None else f"{sorted(map(str, state_dict))}"
            raise ValueError(
                f"This Multiopt has {len(self.optimizers)} optimizers, but the state dict holds {found}. Build the "
                "same optimizers as in the run that saved it."
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)


class _StateOfAll(MutableMapping[Tensor, Any]):
    """View of the state of several optimizers; a `ChainMap` would write every entry into the first one."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    def __getitem__(self, key: Tensor) -> Any:
        return self._owner(key)[key]

    def __setitem__(self, key: Tensor, value: object) -> None:
        self._owner(key)[key] = value

    def __delitem__(self, key: Tensor) -> None:
        del self._owner(key)[key]

    def __contains__(self, key: object) -> bool:
        return any(key in optimizer.state for optimizer in self._optimizers)

    def __iter__(self) -> Iterator[Tensor]:
        return (key for optimizer in self._optimizers for key in optimizer.state)

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers)

    def _owner(self, key: Tensor) -> MutableMapping[Tensor, Any]:
        for optimizer in self._optimizers:
            # Compare identities: `==` of tensors is elementwise.
            if key in optimizer.state or any(key is parameter for parameter in _parameters(optimizer)):
                return optimizer.state
        raise KeyError(key)


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _refuse_unusable(optimizers: Sequence[Optimizer]) -> None:
    if not optimizers:
        raise ValueError("Multiopt needs at least one optimizer.")
    owners: dict[Tensor, str] = {}
    for index, optimizer in enumerate(optimizers):
        name = f"{type(optimizer).__name__} (number {index})"
        for parameter in _parameters(optimizer):
            if owners.setdefault(parameter, name) != name:
                raise ValueError(
                    f"A parameter of shape {tuple(parameter.shape)} is in both {owners[parameter]} and {name}, which "
                    "would update it twice a step. Give each parameter to one optimizer."
                )


def _common_defaults(optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Return the first optimizer's values of the options that all optimizers have.

    Schedulers expect an option in `defaults` to exist in every group.
    """
    common = set.intersection(*(set(optimizer.defaults) for optimizer in optimizers))
    return {option: value for option, value in optimizers[0].defaults.items() if option in common}
