"""Activations that wait for the backward pass in the memory of the CPU."""

from collections.abc import Iterable

import torch
from torch import Tensor

_SMALL = 2**12
"""Bytes from which on a copy is worth its launch."""


class OffloadedActivations(torch.autograd.graph.saved_tensors_hooks):
    """What autograd saves in this context is copied to the CPU, and back when it is needed.

    Parameters stay where they are: they are there anyway. The copies are pinned and ordered by the stream that computes, so
    that nothing has to wait on the side of the CPU.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._kept = {parameter.untyped_storage()._cdata for parameter in parameters}
        super().__init__(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> "Tensor | _Offloaded":
        return tensor if self._stays(tensor) else _Offloaded(tensor)

    def _stays(self, tensor: Tensor) -> bool:
        is_small = tensor.numel() * tensor.element_size() < _SMALL
        return tensor.device.type == "cpu" or is_small or tensor.untyped_storage()._cdata in self._kept


class _Offloaded:
    """A copy on the CPU, which comes back with the strides of the original: compiled backward passes insist on them."""

    def __init__(self, tensor: Tensor) -> None:
        self._shape, self._device = tensor.shape, tensor.device
        # An expanded tensor, such as a mask for all heads, has each value in memory once, and so has its copy.
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.shape[dim] > 1:
                tensor = tensor.narrow(dim, 0, 1)
        self._stride = tensor.stride()
        self.copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
        self.copy.copy_(tensor, non_blocking=True)

    def restored(self) -> Tensor:
        copy = self.copy
        if copy.stride() == self._stride:
            return copy.to(self._device, non_blocking=True).expand(self._shape)
        back = torch.empty_strided(copy.shape, self._stride, dtype=copy.dtype, device=self._device)
        return back.copy_(copy, non_blocking=True).expand(self._shape)


def _unpack(packed: "Tensor | _Offloaded") -> Tensor:
    return packed.restored() if isinstance(packed, _Offloaded) else packed
