"""StepObserver: activations, gradients and non-finite values of one step, by hooks that change nothing.

Values stay on the device until the step is over. Hooks are on modules and on their outputs, so a replayed step computes
the same bits with and without them.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from forgather.ml.checkpoint.encoding.digest import tensor_digest
from forgather.tools.replay.report import ActivationReport, FirstNonFinite, ModuleGradient


@dataclass(frozen=True)
class _Output:
    """Statistics of one output of a module."""

    module: str
    micro_batch: int
    numbers: Tensor
    """Minimum, maximum, absolute maximum of the finite values, and the number of others."""
    bad_rows: Tensor | None


class StepObserver:
    """Statistics of the forward and backward passes of a step."""

    def __init__(self) -> None:
        self.micro_batch = 0
        """Number of the current micro-batch, set by the trainer."""
        self._outputs: list[_Output] = []
        self._gradients: list[_Output] = []

    @contextlib.contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Record the outputs of all modules, and the gradients of these outputs, while the body runs."""
        handles = [
            module.register_forward_hook(self._recorder(name or type(model).__name__))
            for name, module in model.named_modules()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _recorder(self, name: str) -> Any:
        def record(module: nn.Module, inputs: object, outputs: object) -> None:
            # Trial passes that choose the loss run without gradients, and are no part of the step.
            if not torch.is_grad_enabled():
                return
            for tensor in _tensors(outputs):
                self._outputs.append(_statistics(name, self.micro_batch, tensor.detach()))
                if tensor.requires_grad:
                    tensor.register_hook(self._gradient_recorder(name, self.micro_batch))

        return record

    def _gradient_recorder(self, name: str, micro_batch: int) -> Any:
        def record(gradient: Tensor) -> None:
            self._gradients.append(_statistics(name, micro_batch, gradient.detach()))

        return record

    def activations(self) -> list[ActivationReport]:
        """Return the extremes of each module, in the order of the first outputs."""
        by_module: dict[str, list[Tensor]] = {}
        for output in self._outputs:
            by_module.setdefault(output.module, []).append(output.numbers)
        return [_activation(module, torch.stack(numbers).cpu()) for module, numbers in by_module.items()]

    def first_nonfinite(self) -> FirstNonFinite | None:
        """Return the first module with a non-finite output."""
        return _first(self._outputs)

    def first_nonfinite_gradient(self) -> FirstNonFinite | None:
        """Return the first module with a non-finite gradient of its output, in the order of the backward pass."""
        return _first(self._gradients)


def module_gradients(named: Sequence[tuple[str, nn.Parameter]]) -> list[ModuleGradient]:
    """Return the gradient norm of each module that has parameters, in the order of the parameters."""
    by_module: dict[str, list[Tensor]] = {}
    for name, parameter in named:
        if parameter.grad is not None:
            by_module.setdefault(name.rpartition(".")[0], []).append(parameter.grad.detach())
    return [
        ModuleGradient(
            module,
            float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(one.double()) for one in gradients]))),
            sum(int((~torch.isfinite(one)).sum()) for one in gradients),
        )
        for module, gradients in by_module.items()
    ]


def gradient_digests(named: Sequence[tuple[str, nn.Parameter]]) -> dict[str, str]:
    """Return a hash of each gradient by parameter name."""
    return {name: tensor_digest(one.grad.detach()) for name, one in named if one.grad is not None}


def _statistics(module: str, micro_batch: int, tensor: Tensor) -> _Output:
    is_finite = torch.isfinite(tensor)
    finite = torch.where(is_finite, tensor, torch.zeros_like(tensor)).float()
    low, high = torch.aminmax(finite)
    numbers = torch.stack([low, high, torch.maximum(-low, high), (~is_finite).sum().float()])
    bad_rows = ~is_finite.flatten(1).all(1) if tensor.ndim > 1 else None
    return _Output(module, micro_batch, numbers, bad_rows)


def _activation(module: str, numbers: Tensor) -> ActivationReport:
    return ActivationReport(
        module,
        float(numbers[:, 0].min()),
        float(numbers[:, 1].max()),
        float(numbers[:, 2].max()),
        int(numbers[:, 3].sum()),
    )


def _first(outputs: Sequence[_Output]) -> FirstNonFinite | None:
    for output in outputs:
        if output.numbers[3] > 0:
            rows = () if output.bad_rows is None else tuple(torch.nonzero(output.bad_rows).flatten().tolist())
            return FirstNonFinite(output.module, output.micro_batch, rows)
    return None


def _tensors(outputs: object) -> Iterator[Tensor]:
    """Yield the floating-point tensors of a module's outputs."""
    if isinstance(outputs, Tensor):
        if outputs.is_floating_point() and outputs.numel():
            yield outputs
    elif isinstance(outputs, dict):
        yield from (tensor for value in outputs.values() for tensor in _tensors(value))
    elif isinstance(outputs, (list, tuple)):
        yield from (tensor for value in outputs for tensor in _tensors(value))
