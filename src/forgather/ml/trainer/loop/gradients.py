"""Gradient norm and zero_grad over all parameters, optimised for many small tensors.

With small models the Python and kernel-launch overhead of these two operations is a visible part of the step time.
`Optimization` computes norms with it; `Trainer` and `StepRunner` clear gradients with it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors
from torch.nn.utils import get_total_norm

from forgather.ml.optim.gradient_trace import GradientTrace

_FEW_ELEMENTS = 2**16


class GradientNorm:
    """Total gradient norm of the parameters of this rank.

    The constructor chooses the method from the parameters. `trace` has the values behind the last norm, so that a
    non-finite norm can be attributed to parameters. Gradients in bfloat16 and float16 are accumulated in float32.
    """

    trace: GradientTrace | None = None

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        # Tensor subclasses such as DTensor need torch's own implementation, which handles their layout.
        are_plain = all(type(parameter) in (Tensor, torch.nn.Parameter) for parameter in parameters)
        self._are_alike = are_plain and len({(one.device, one.dtype) for one in parameters}) == 1
        # None: the dtype of the gradients. A norm in float16 may overflow, and one in bfloat16 is imprecise.
        self._dtype = torch.float32 if any(map(is_narrow, parameters)) else None
        self._are_few = sum(parameter.numel() for parameter in parameters) <= _FEW_ELEMENTS

    def __call__(self, norm_type: float = 2.0) -> Tensor:
        gradients = [gradient for one in self._parameters if (gradient := one.grad) is not None]
        if not self._are_alike or not gradients:
            self.trace = None
            narrow = any(map(is_narrow, gradients))
            return _norm_of_norms(gradients, norm_type) if narrow else get_total_norm(gradients, norm_type)
        if self._are_few:
            # One norm over a flat copy costs less than one norm per small tensor.
            values = _flatten_dense_tensors(gradients)
        else:
            values = torch.stack(torch._foreach_norm(gradients, norm_type, self._dtype))
        parameters = self._parameters
        if len(gradients) < len(parameters):
            parameters = [parameter for parameter in parameters if parameter.grad is not None]
        self.trace = GradientTrace(parameters, values)
        norm: Tensor = torch.linalg.vector_norm(values, norm_type, dtype=self._dtype)
        return norm


def is_narrow(tensor: Tensor) -> bool:
    """Return whether a tensor has floating-point numbers of fewer than 32 bits."""
    return tensor.is_floating_point() and tensor.dtype.itemsize < 4


def _norm_of_norms(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the norm of gradients of several dtypes, devices or layouts, each accumulated in at least float32."""
    norms = [
        torch.linalg.vector_norm(one, norm_type, dtype=torch.promote_types(one.dtype, torch.float32))
        for one in gradients
    ]
    norm: Tensor = torch.linalg.vector_norm(torch.stack([one.to(norms[0].device) for one in norms]), norm_type)
    return norm


def clear_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Set all gradients to None, as `zero_grad` does; an overridden `zero_grad` is called."""
    # Most of the time of torch's own `zero_grad` is its profiler hook, so the loop is written out here.
    if type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
