"""Activations that wait for the backward pass in the memory of the CPU."""

from collections.abc import Iterable
from typing import Any

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

    def _pack(self, tensor: Tensor) -> Any:
        is_small = tensor.numel() * tensor.element_size() < _SMALL
        if tensor.device.type == "cpu" or is_small or tensor.untyped_storage()._cdata in self._kept:
            return tensor
        # With its strides: compiled backward passes insist on them.
        copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
        copy.copy_(tensor, non_blocking=True)
        return tensor.device, copy


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    device, copy = packed
    back: Tensor = copy.to(device, non_blocking=True)
    return back
