"""Optimizers of torchao with quantised moments (8 and 4 bits), with a state of plain tensors that checkpoints can store.

Between two steps each quantised moment is a mapping of its parts: codes, scales and the quantisation map. A step puts them
together again, without a copy. `named_optimizers` wraps the classes of torchao.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

# The first moment has a sign, the others are squares.
_SIGNED = "exp_avg"


def with_plain_states(cls: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return a subclass of a torchao optimizer with the same updates and plain tensors as state."""

    def init(self: Any, params: Any, *values: Any, **options: Any) -> None:
        cls.__init__(self, params, *values, **options)
        members = [one for group in self.param_groups for one in group["params"]]
        if any(isinstance(one, DTensor) for one in members):
            raise ValueError(
                f"{cls.__name__} cannot be used with sharded parameters: checkpoints cannot divide its quantised moments. Use "
                "another optimizer with FSDP2Trainer, or DDPTrainer."
            )

    def step(self: Any, closure: Any = None) -> Any:
        for parameter, state in self.state.items():
            for key, value in state.items():
                if isinstance(value, Mapping):
                    state[key] = _joined(self, parameter, key, value)
        try:
            return cls.step(self, closure)
        finally:
            for state in self.state.values():
                for key, value in state.items():
                    if hasattr(value, "__tensor_flatten__"):
                        state[key] = {name: getattr(value, name) for name in value.__tensor_flatten__()[0]}

    return type(cls.__name__, (cls,), {"__init__": init, "step": step, "__module__": cls.__module__})


def _joined(optimizer: Any, parameter: Tensor, key: str, parts: Mapping[str, Tensor]) -> Tensor:
    """Return the quantised moment that consists of these parts."""
    # A new moment on the meta device has the class and the attributes, without memory.
    like = optimizer._subclass_zeros(parameter.detach().to("meta"), key == _SIGNED, optimizer.block_size)
    _, attributes = like.__tensor_flatten__()
    joined: Tensor = type(like).__tensor_unflatten__(dict(parts), attributes)
    return joined
