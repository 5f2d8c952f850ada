"""Float32 updates of bfloat16 weights: master weights, or stochastic rounding (`param_precision`).

`PreciseOptimizer` wraps any optimizer. In a step, the param groups hold float32 stand-ins instead of the parameters, with
float32 gradients; afterwards the result is rounded into the parameters. Outside of a step, groups and state belong to
the parameters, so schedules and checkpoints need no adaptation. `Recipes` wraps the optimizer.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from forgather.ml.checkpoint.state.optimizer_checks import is_of_torch
from forgather.ml.checkpoint.state.update_precision import MASTER, ROUNDING, is_short
from forgather.ml.optim.multiopt import Multiopt
from forgather.ml.optim.stochastic_rounding import round_stochastically_, rounding_key

_AT_ONCE = 2**24
"""Number of elements that are copied to float32 at a time."""

State = MutableMapping[Tensor, dict[str, Any]]


class Rounding(Protocol):
    """Protocol of the two precisions: float32 values for a step, and their way back into the parameters."""

    state_key: str

    def widened(self, parameters: Sequence[Tensor], entries: Sequence[Any]) -> list[Tensor]:
        """Return float32 values for the optimizer; `entries` are the stored states of this object, or None."""

    def store(self, parameters: Sequence[Tensor], values: Sequence[Tensor], entries: Sequence[Any]) -> list[Any]:
        """Round the updated values into the parameters, and return the states to store."""

    def precise(self, parameter: Tensor) -> Tensor | None:
        """Return a float32 value of the parameter, if there is one."""


class MasterWeights:
    """Float32 copies of the parameters, kept in the optimizer state; parameters are their values, rounded to nearest."""

    state_key = MASTER

    def __init__(self) -> None:
        self._seen: dict[Tensor, tuple[Tensor, int, int]] = {}

    def widened(self, parameters: Sequence[Tensor], entries: Sequence[Any]) -> list[Tensor]:
        return [
            one.detach().to(torch.float32) if master is None else self._current(one, master)
            for one, master in zip(parameters, entries, strict=True)
        ]

    def store(self, parameters: Sequence[Tensor], values: Sequence[Tensor], entries: Sequence[Any]) -> list[Any]:
        # A rank may have no such parameter, and torch rejects empty lists.
        if parameters:
            torch._foreach_copy_(list(parameters), list(values))
        for parameter, master in zip(parameters, values, strict=True):
            self._seen[parameter] = master, parameter._version, master._version
        return list(values)

    def precise(self, parameter: Tensor) -> Tensor | None:
        seen = self._seen.get(parameter)
        return None if seen is None else seen[0]

    def _current(self, parameter: Tensor, master: Tensor) -> Tensor:
        """Return the master weight; where the parameter was changed since the last step, the parameter wins."""
        # Loading weights, a callback or `averaged_weights` may have written to the parameter. Version counters detect a
        # write without reading the device. After a write the values decide, because it may have restored the old value.
        seen = self._seen.get(parameter)
        if seen is not None and seen[0] is master and seen[1:] == (parameter._version, master._version):
            return master
        value = parameter.detach()
        return torch.where(master.to(value.dtype) == value, master, value.to(torch.float32))


class StochasticRounding:
    """Rounding to one of the two bfloat16 neighbours at random, so that small updates are not lost on average.

    The random bits depend on the seed, the FQN, the number of earlier roundings and the element. They are therefore equal
    on all replicas, and independent of the number of ranks and stages.
    """

    state_key = ROUNDING

    def __init__(self, names: Mapping[Tensor, str], seed: int) -> None:
        self._names = names
        self._seed = seed

    def widened(self, parameters: Sequence[Tensor], entries: Sequence[Any]) -> list[Tensor]:
        return [one.detach().to(torch.float32) for one in parameters]

    def store(self, parameters: Sequence[Tensor], values: Sequence[Tensor], entries: Sequence[Any]) -> list[Any]:
        return [self._round(*each) for each in zip(parameters, values, entries, strict=True)]

    def _round(self, parameter: Tensor, value: Tensor, entry: dict[str, int] | None) -> dict[str, int]:
        seed, count = (self._seed, 0) if entry is None else (entry["seed"], entry["count"])
        round_stochastically_(parameter, value, rounding_key(seed, self._names[parameter], count))
        return {"seed": seed, "count": count + 1}

    def precise(self, parameter: Tensor) -> Tensor | None:
        return None


class PreciseOptimizer(Optimizer):
    """Optimizer that updates bfloat16 parameters in float32; other parameters are updated as they are.

    Groups, state and options are the wrapped optimizer's own.
    """

    update_dtype = torch.float32

    def __init__(self, optimizer: Any, rounding: Rounding) -> None:
        # Torch's own constructor would make new groups and a new state.
        self.__setstate__({"optimizer": optimizer, "_rounding": rounding})
        for part in _elementary(optimizer):
            for parameter, state in part.state.items():
                # Some optimizers create their state at construction, in the dtype of the parameter.
                state.update({key: value.float() for key, value in state.items() if _is_alike(value, parameter)})

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "_rounding": self._rounding}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.optimizer: Any = state["optimizer"]
        self._rounding: Rounding = state["_rounding"]
        # Code that handles composed optimizers, such as `Multiopt`, finds their parts by this attribute.
        if (parts := getattr(self.optimizer, "optimizers", None)) is not None:
            self.optimizers = parts
        super().__setstate__({"defaults": dict(getattr(self.optimizer, "defaults", {}))})

    @property
    def state_key(self) -> str:
        return self._rounding.state_key

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> State:  # type: ignore[override]
        state: State = self.optimizer.state
        return state

    def precise(self, parameter: Tensor) -> Tensor | None:
        """Return the master weight of a parameter, or None."""
        return self._rounding.precise(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in _separate(self.optimizer):
            parts = list(_elementary(optimizer))
            updated = {
                parameter: part.state
                for part in parts
                for group in part.param_groups
                for parameter in group["params"]
                if parameter.grad is not None
            }
            for portion in _portions(optimizer, list(updated)):
                self._step(optimizer, parts, {one: updated[one] for one in portion})
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def _step(self, optimizer: Any, parts: Sequence[Any], chosen: Mapping[Tensor, State]) -> None:
        """Step the optimizer on some of its parameters, the bfloat16 ones in float32."""
        short = {one: state for one, state in chosen.items() if is_short(one)}
        parameters, versions = list(short), [one._version for one in short]
        # The optimizer must not see this entry: an empty state tells it that this is the first step of a parameter.
        entries = [state.get(one, {}).pop(self.state_key, None) for one, state in short.items()]
        values = self._rounding.widened(parameters, entries)
        stand_ins = [_stand_in(one, value) for one, value in zip(parameters, values, strict=True)]
        replaced = dict(zip(parameters, stand_ins, strict=True))
        groups = [(group, group["params"]) for part in parts for group in part.param_groups]
        try:
            # Optimizers look up state by the parameter object, so moments must be found under the stand-ins.
            _move_states(short.values(), parameters, stand_ins)
            for group, members in groups:
                # A parameter without a gradient stays in its group, where the optimizer skips it.
                group["params"] = [replaced.get(one, one) for one in members if one in chosen or one.grad is None]
            optimizer.step()
        finally:
            for group, members in groups:
                group["params"] = members
            # Also after an error: groups and state must belong to the parameters again, or a later save would miss the
            # moments.
            _move_states(short.values(), stand_ins, parameters)
            self._keep(short, entries)
        # Only stand-ins were in the groups. If a parameter has changed, the optimizer has another reference to it.
        if versions != [one._version for one in parameters]:
            raise ValueError(
                f"param_precision cannot be used with {type(optimizer).__name__}: it keeps references to the parameters "
                "outside of its param_groups, and updated the bfloat16 weights directly. Use an optimizer that reads its "
                "param_groups in every step, or param_precision='fp32'."
            )
        # Free the float32 gradients before rounding, which allocates memory as well.
        for stand_in in stand_ins:
            stand_in.grad = None
        self._keep(short, self._rounding.store(parameters, values, entries))

    def _keep(self, short: Mapping[Tensor, State], entries: Sequence[Any]) -> None:
        for (parameter, state), entry in zip(short.items(), entries, strict=True):
            if entry is not None:
                state[parameter] = {**state.get(parameter, {}), self.state_key: entry}


def _stand_in(parameter: Tensor, value: Tensor) -> nn.Parameter:
    """Return a parameter with the memory of a float32 value, and with the gradient in float32."""
    assert parameter.grad is not None
    stand_in = nn.Parameter(value, requires_grad=False)
    stand_in.grad = parameter.grad.to(torch.float32)
    return stand_in


def _move_states(states: Any, old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    for state, source, target in zip(states, old, new, strict=True):
        # Without the first condition, an empty default entry would be created.
        if source in state and (found := state.pop(source)):
            state[target] = found


def _separate(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizers that can be stepped one by one."""
    if type(optimizer) is Multiopt:
        for part in optimizer.optimizers:
            yield from _separate(part)
    else:
        yield optimizer


def _elementary(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizers inside a composed optimizer."""
    parts = getattr(optimizer, "optimizers", None)
    if parts is None:
        yield optimizer
        return
    for part in parts.values() if isinstance(parts, Mapping) else parts:
        yield from _elementary(part)


def _portions(optimizer: Any, parameters: list[Tensor]) -> list[list[Tensor]]:
    """Divide the parameters, so that only some have float32 copies at once."""
    # Torch's own optimizers update each parameter independently. Others, and step hooks, may need all parameters.
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    if not is_of_torch(optimizer) or any(getattr(optimizer, name, None) for name in hooks):
        return [parameters]
    portions: list[list[Tensor]] = [[]]
    room = _AT_ONCE
    for one in parameters:
        size = one.numel() if is_short(one) else 0
        if size > room and portions[-1]:
            portions.append([])
            room = _AT_ONCE
        portions[-1].append(one)
        room -= size
    return portions


def _is_alike(value: object, parameter: Tensor) -> bool:
    """Return whether a state value is a tensor of the parameter's shape in low precision."""
    return isinstance(value, Tensor) and is_short(value) and value.shape == parameter.shape
