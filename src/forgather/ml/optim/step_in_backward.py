"""An optimizer that acts during the backward pass: no two gradients have to exist at once."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle


class StepInBackward:
    """Updates each parameter as soon as its gradient is complete, and lets go of the gradient.

    The optimizer stays what it is, with its groups and its state, so schedules and checkpoints notice nothing; for a
    parameter it is stepped with that one alone, which makes a backward pass linear in the number of parameters.
    Calling the object gives the norm of the gradients since the last call.
    """

    def __init__(self, optimizer: Any) -> None:
        refuse_several_optimizers(optimizer, None)
        self._optimizer = optimizer
        self._norms: list[Tensor] = []
        self._unchecked: set[Tensor] = set()
        self._handles: list[RemovableHandle] = []
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                self._unchecked.add(parameter)
                self._handles.append(parameter.register_post_accumulate_grad_hook(partial(self._step, number, index)))

    def close(self) -> None:
        """Leave the parameters alone from now on."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __call__(self, norm_type: float = 2.0) -> Tensor:
        if norm_type != 2.0:
            raise ValueError(
                f"norm_type={norm_type} cannot be used with fuse_optim_with_backward=True: gradients are gone when it is asked "
                "for, and of each only the Euclidean norm was kept."
            )
        norms, self._norms = self._norms, []
        if not norms:
            return torch.zeros(())
        return torch.linalg.vector_norm(torch.stack([norm.to(norms[-1].device, non_blocking=True) for norm in norms]))

    def _step(self, number: int, index: int, parameter: Tensor) -> None:
        assert parameter.grad is not None
        dtype = torch.promote_types(parameter.grad.dtype, torch.float32)
        self._norms.append(torch.linalg.vector_norm(parameter.grad, dtype=dtype))
        optimizer = self._optimizer
        groups = optimizer.param_groups
        alone = _reduced_to(groups[number], index)
        optimizer.param_groups = [alone]
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = groups
        parameter.grad = None
        if parameter in self._unchecked:
            self._unchecked.discard(parameter)
            self._require_no_state_of_group(alone, groups[number])

    def _require_no_state_of_group(self, alone: dict[str, Any], group: dict[str, Any]) -> None:
        """What an optimizer notes in a group would be lost, and is meant for one step of all parameters."""
        changed = [
            name for name, value in alone.items() if not name.startswith("param") and value is not group.get(name)
        ]
        if changed:
            raise ValueError(
                f"fuse_optim_with_backward=True cannot be combined with {type(self._optimizer).__name__}: it keeps "
                f"{', '.join(changed)} for all parameters of a group together, but parameters are updated one by one. Use an "
                "optimizer whose state belongs to single parameters, or turn fuse_optim_with_backward off."
            )


def refuse_several_optimizers(optimizer: Any, groups: Mapping[str, Any] | None) -> None:
    """Refuse an optimizer made of several, and groups of parameters with optimizers of their own."""
    own = [name for name, group in (groups or {}).items() if isinstance(group, Mapping) and group.get("factory")]
    if own or getattr(optimizer, "optimizers", None) is not None:
        which = f"optimizer_groups {', '.join(own)} have factories" if own else f"{type(optimizer).__name__} was given"
        raise ValueError(
            f"fuse_optim_with_backward=True cannot be combined with several optimizers ({which}): one optimizer is stepped "
            "for each parameter. Give all groups the same optimizer, or turn fuse_optim_with_backward off."
        )


def _reduced_to(group: dict[str, Any], index: int) -> dict[str, Any]:
    """The group with one of its parameters alone."""
    alone = {**group, "params": [group["params"][index]]}
    if "param_names" in group:
        alone["param_names"] = [group["param_names"][index]]
    return alone
