"""What a step does to all gradients at once, at the least cost: with small models it is a part of the step that shows."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from forgather.ml.optim.gradient_trace import GradientTrace

_FEW_ELEMENTS = 2**16


class GradientNorm:
    """The norm of all gradients of some parameters, for one device.

    How to compute it follows from the parameters, and is found out once. `trace` tells what the last one was made of.
    """

    trace: GradientTrace | None = None

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        are_plain = all(type(parameter) in (Tensor, torch.nn.Parameter) for parameter in parameters)
        self._are_alike = are_plain and len({(one.device, one.dtype) for one in parameters}) == 1
        self._are_few = sum(parameter.numel() for parameter in parameters) <= _FEW_ELEMENTS

    def __call__(self, norm_type: float = 2.0) -> Tensor:
        gradients = [gradient for one in self._parameters if (gradient := one.grad) is not None]
        if not self._are_alike or not gradients:
            self.trace = None
            return torch.nn.utils.get_total_norm(gradients, norm_type)
        if self._are_few:
            # One norm of a copy costs less than a norm for each of many small tensors.
            values = _flatten_dense_tensors(gradients)
        else:
            values = torch.stack(torch._foreach_norm(gradients, norm_type))
        parameters = self._parameters
        if len(gradients) < len(parameters):
            parameters = [parameter for parameter in parameters if parameter.grad is not None]
        self.trace = GradientTrace(parameters, values)
        norm: Tensor = torch.linalg.vector_norm(values, norm_type)
        return norm


def clear_gradients(optimizer: torch.optim.Optimizer) -> None:
    """The optimizer's `zero_grad`; torch's own is done by hand, since most of its time goes into being profiled."""
    if type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
