"""Memory of an accelerator by purpose: parameters, gradients, optimizer moments, EMA, and the rest (activations).

`measure` counts the storages that a trainer holds on its device. It runs after a failure, never in a step.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forgather.ml.checkpoint.sharding.sharded_tensors import local_part
from forgather.ml.trainer.diagnostics.health import format_bytes

if TYPE_CHECKING:
    from forgather.ml.trainer.trainer import Trainer


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on one device."""

    parameters: int
    """Parameters and buffers."""
    gradients: int
    moments: int
    """Tensors in the state of the optimizer."""
    average: int
    """EMA of the weights."""
    allocated: int
    reserved: int
    """Memory that the caching allocator holds, used or not."""
    total: int

    @property
    def state(self) -> int:
        """Bytes that do not depend on the batch."""
        return self.parameters + self.gradients + self.moments + self.average

    @property
    def rest(self) -> int:
        return max(self.allocated - self.state, 0)

    @property
    def unused(self) -> int:
        return max(self.reserved - self.allocated, 0)

    def __str__(self) -> str:
        parts = {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer moments": self.moments,
            "EMA": self.average,
            "activations and other tensors": self.rest,
        }
        # An EMA is optional. The other rows are shown even if they are empty.
        shown = [f"{name} {format_bytes(size)}" for name, size in parts.items() if size or name != "EMA"]
        return (
            f"Allocated {format_bytes(self.allocated)} of {format_bytes(self.total)}: {', '.join(shown)}. "
            f"Reserved but unused: {format_bytes(self.unused)}."
        )


def measure(trainer: "Trainer[Any]") -> MemoryUse:
    """Return the memory on the trainer's device; objects that set-up has not built yet count as zero."""
    device = trainer.device
    modules = modules_of(trainer)
    parameters = [parameter for module in modules for parameter in module.parameters()]
    buffers = (buffer for module in modules for buffer in module.buffers())
    average = trainer.recipes.average
    state = {} if trainer.optimizer is None else trainer.optimizer.state
    return MemoryUse(
        parameters=bytes_on(device, [*parameters, *buffers]),
        gradients=bytes_on(device, (one.grad for one in parameters)),
        moments=bytes_on(device, tensors_in(state)),
        average=0 if average is None else bytes_on(device, average.tensors()),
        allocated=torch.accelerator.memory_allocated(device),
        reserved=torch.accelerator.memory_reserved(device),
        total=_total_memory(device),
    )


def modules_of(trainer: "Trainer[Any]") -> list[nn.Module]:
    """Return the modules that run on this rank, or none if the error came before they were built."""
    if trainer.model is None or (trainer._is_pipeline_parallel() and not hasattr(trainer, "pipeline")):
        return []
    return [trainer._forward_modules()]


def bytes_on(device: torch.device, tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of distinct storages on the device."""
    storages = (local_part(one).untyped_storage() for one in tensors if one is not None and one.device == device)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors in nested mappings, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from tensors_in(inner)


def _total_memory(device: torch.device) -> int:
    # Only these backends are known to implement it.
    return torch.accelerator.get_memory_info(device)[1] if device.type in ("cuda", "xpu") else 0
