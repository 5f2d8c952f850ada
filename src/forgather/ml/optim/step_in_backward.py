"""Optimizer step fused with the backward pass: each gradient is applied and freed as soon as it is complete.

Used by trainers with `fuse_optim_with_backward=True`. Optimizers that keep state for all parameters together are
rejected, because the optimizer is stepped once per parameter.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from forgather.ml.optim.gradient_trace import GradientTrace


class StepInBackward:
    """Context that updates each parameter as soon as its gradient is complete, and frees the gradient.

    The optimizer keeps its groups and its state, so schedules and checkpoints work as usual. It is stepped with a
    single parameter at a time, so the cost of a backward pass stays linear in the number of parameters. Calling the
    object returns the norm of the gradients since the last call.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        refuse_several_optimizers(optimizer, None)
        self._optimizer = optimizer
        self._norms: list[Tensor] = []
        self._updated: list[Tensor] = []
        self.trace: GradientTrace | None = None
        self._unchecked: set[Tensor] = set()
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> "StepInBackward":
        for number, group in enumerate(self._optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                # Autograd accepts no hooks on frozen parameters.
                if not parameter.requires_grad:
                    continue
                self._unchecked.add(parameter)
                self._handles.append(parameter.register_post_accumulate_grad_hook(partial(self._step, number, index)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __call__(self, norm_type: float = 2.0) -> Tensor:
        if norm_type != 2.0:
            raise ValueError(
                f"norm_type={norm_type} cannot be used with fuse_optim_with_backward=True: gradients are freed in the "
                "backward pass, and only their Euclidean norms are kept."
            )
        norms, self._norms = self._norms, []
        updated, self._updated = self._updated, []
        if not norms:
            self.trace = None
            return torch.zeros(())
        # Parameters, and so their norms, may be on different devices.
        values = torch.stack([norm.to(norms[-1].device, non_blocking=True) for norm in norms])
        self.trace = GradientTrace(updated, values)
        norm: Tensor = torch.linalg.vector_norm(values)
        return norm

    def _step(self, number: int, index: int, parameter: Tensor) -> None:
        assert parameter.grad is not None
        # A norm in float16 may overflow, and one in bfloat16 is imprecise.
        dtype = torch.promote_types(parameter.grad.dtype, torch.float32)
        self._norms.append(torch.linalg.vector_norm(parameter.grad, dtype=dtype))
        self._updated.append(parameter)
        optimizer = self._optimizer
        groups = optimizer.param_groups
        alone = _reduced_to(groups[number], index)
        # Checked on the first step of each parameter only: copying and comparing the state costs time.
        common = self._common_state(groups[number]) if parameter in self._unchecked else None
        # The group is a copy with one parameter. The optimizer's state is keyed by parameter, so it is not affected.
        optimizer.param_groups = [alone]
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = groups
        # Freeing the gradient here is the purpose: no two gradients have to exist at once.
        parameter.grad = None
        if common is not None:
            self._unchecked.discard(parameter)
            self._require_unchanged(common, alone)

    def _common_state(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return numbers of the group and of the optimizer: state that may be shared by all parameters."""
        # A wrapper such as `PreciseOptimizer` keeps its numbers in the wrapped optimizer.
        optimizer = getattr(self._optimizer, "optimizer", self._optimizer)
        own = {name: value for name, value in vars(optimizer).items() if not name.startswith("_")}
        return {name: _copied(value) for name, value in {**own, **group}.items() if _is_a_number(value)}

    def _require_unchanged(self, before: dict[str, Any], alone: dict[str, Any]) -> None:
        """Raise ValueError if shared state changed: it would change once per parameter, or be lost with the copy."""
        after = self._common_state(alone)
        changed = [name for name in after if name not in before or not _is_equal(before[name], after[name])]
        if changed:
            raise ValueError(
                f"fuse_optim_with_backward=True cannot be combined with {type(self._optimizer).__name__}: it keeps "
                f"{', '.join(changed)} for all parameters together, but parameters are updated one by one. Use an optimizer "
                "with separate state for each parameter, or turn fuse_optim_with_backward off."
            )


def refuse_several_optimizers(optimizer: object, groups: Mapping[str, Any] | None) -> None:
    """Raise ValueError for a combined optimizer, or for parameter groups with their own optimizers."""
    own = [name for name, group in (groups or {}).items() if isinstance(group, Mapping) and group.get("factory")]
    if own or getattr(optimizer, "optimizers", None) is not None:
        which = f"optimizer_groups {', '.join(own)} have factories" if own else f"{type(optimizer).__name__} was given"
        raise ValueError(
            f"fuse_optim_with_backward=True cannot be combined with several optimizers ({which}): one optimizer is stepped "
            "for each parameter. Give all groups the same optimizer, or turn fuse_optim_with_backward off."
        )


def _reduced_to(group: dict[str, Any], index: int) -> dict[str, Any]:
    """Return a copy of the group with only one of its parameters."""
    alone = {**group, "params": [group["params"][index]]}
    if "param_names" in group:
        alone["param_names"] = [group["param_names"][index]]
    return alone


def _is_a_number(value: object) -> bool:
    return isinstance(value, (int, float, Tensor))


def _copied(value: object) -> object:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _is_equal(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)
