"""Activation offloading: saved activations are copied to CPU memory until the backward pass needs them.

`Recipes.activations` creates the context if `enable_activation_offloading` is set.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

_SMALL = 2**12
"""Size in bytes below which a copy costs more than it saves."""


class OffloadedActivations(torch.autograd.graph.saved_tensors_hooks):
    """Context that copies tensors saved by autograd to the CPU, and back in the backward pass.

    Parameters are not copied: they stay on the device anyway. Copies use pinned memory and the compute stream, so that
    the CPU never waits for them.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        # By storage, because autograd often saves a view of a parameter, such as its transpose.
        self._kept = {parameter.untyped_storage()._cdata for parameter in parameters}
        super().__init__(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> "Tensor | _Offloaded":
        return tensor if self._stays(tensor) else _Offloaded(tensor)

    def _stays(self, tensor: Tensor) -> bool:
        is_small = tensor.numel() * tensor.element_size() < _SMALL
        return tensor.device.type == "cpu" or is_small or tensor.untyped_storage()._cdata in self._kept


class _Offloaded:
    """CPU copy of a tensor that is restored with its original strides: compiled backward passes require them."""

    def __init__(self, tensor: Tensor) -> None:
        self._shape, self._device = tensor.shape, tensor.device
        # An expanded tensor, such as a mask for all heads, stores each value once. Copy only the stored values.
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
