"""Activation offloading: saved activations are copied to CPU memory until the backward pass needs them.

Copies run on a stream beside the compute stream. In the backward pass, activations return a few tensors ahead of their
use. `Recipes.activations` creates the context if `enable_activation_offloading` is set.
"""

import weakref
from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

from forgather.ml.trainer.loading.copy_streams import can_pin, copy_stream

_SMALL = 2**12
"""Size in bytes below which a copy costs more than it saves."""
_UNDER_WAY = 8
"""Number of activations that may be on their way to the CPU; they still occupy device memory."""
_AHEAD = 3
"""Number of activations that are copied back before the backward pass reaches them."""


class OffloadedActivations(torch.autograd.graph.saved_tensors_hooks):
    """Context that copies tensors saved by autograd to the CPU, and back in the backward pass.

    Parameters are not copied: they stay on the device anyway. Copies use pinned memory and a separate stream, so that
    neither the CPU nor the compute stream waits for them.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        # By storage, because autograd often saves a view of a parameter, such as its transpose.
        self._kept = {parameter.untyped_storage()._cdata for parameter in parameters}
        self._under_way: deque[tuple[torch.Event, Tensor]] = deque()
        # A weak reference: autograd decides how long a copy lives.
        self._last: weakref.ref[_Offloaded] | None = None
        super().__init__(self._pack, _unpack)

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        self._release(0)

    def _pack(self, tensor: Tensor) -> "Tensor | _Offloaded":
        if self._stays(tensor):
            return tensor
        packed = _Offloaded(tensor, self._last)
        self._last = weakref.ref(packed)
        if packed.left is not None:
            self._under_way.append((packed.left, tensor))
            self._release(_UNDER_WAY)
        return packed

    def _stays(self, tensor: Tensor) -> bool:
        is_small = tensor.numel() * tensor.element_size() < _SMALL
        return tensor.device.type == "cpu" or is_small or tensor.untyped_storage()._cdata in self._kept

    def _release(self, limit: int) -> None:
        """Let the compute stream wait for the oldest copies until at most `limit` remain, and free their tensors."""
        # `Tensor.record_stream` would be simpler, but it frees memory only when the host sees the end of the copy. The
        # host is far ahead of the device, so that all activations would stay allocated.
        while len(self._under_way) > limit:
            left, tensor = self._under_way.popleft()
            torch.accelerator.current_stream(tensor.device).wait_event(left)


class _Offloaded:
    """CPU copy of a tensor that is restored with its original strides: compiled backward passes require them."""

    def __init__(self, tensor: Tensor, before: "weakref.ref[_Offloaded] | None") -> None:
        self._shape, self._device = tensor.shape, tensor.device
        # An expanded tensor, such as a mask for all heads, stores each value once. Copy only the stored values.
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.shape[dim] > 1:
                tensor = tensor.narrow(dim, 0, 1)
        self._stride = tensor.stride()
        self.before = before
        """The activation saved before this one, which the backward pass needs after it."""
        self.left: torch.Event | None = None
        """End of the copy to the CPU."""
        self._restored: tuple[Tensor, torch.Event | None] | None = None
        self.copy = torch.empty_like(tensor, device="cpu", pin_memory=can_pin(self._device))
        # Without an accelerator, only fake tensors of compilers come here.
        if not can_pin(self._device) or not torch.accelerator.is_available():
            self.copy.copy_(tensor, non_blocking=True)
            return
        stream = copy_stream(self._device, "activations")
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        with stream:
            self.copy.copy_(tensor, non_blocking=True)
            self.left = stream.record_event()

    def bring_back(self) -> None:
        """Begin the copy to the device, unless it has begun."""
        if self._restored is not None:
            return
        copy = self.copy
        # Without an event no copy stream was used, and a plain copy is enough.
        if self.left is None and copy.stride() == self._stride:
            self._restored = copy.to(self._device, non_blocking=True), None
            return
        back = torch.empty_strided(copy.shape, self._stride, dtype=copy.dtype, device=self._device)
        if self.left is None:
            self._restored = back.copy_(copy, non_blocking=True), None
            return
        # The memory comes from the compute stream, where earlier work may still use it.
        stream = copy_stream(self._device, "activations")
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        with stream:
            back.copy_(copy, non_blocking=True)
            self._restored = back, stream.record_event()

    def restored(self) -> Tensor:
        self.bring_back()
        assert self._restored is not None
        (back, arrived), self._restored = self._restored, None
        if arrived is not None:
            torch.accelerator.current_stream(self._device).wait_event(arrived)
        return back.expand(self._shape)

    def __del__(self) -> None:
        # A copy that no backward pass has used: the compute stream must not reuse its memory before the copy ends.
        if self._restored is not None and self._restored[1] is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._restored[1])


def _unpack(packed: "Tensor | _Offloaded") -> Tensor:
    if not isinstance(packed, _Offloaded):
        return packed
    tensor = packed.restored()
    earlier = packed
    # Autograd unpacks in reverse order, so the tensors saved just before this one are needed next.
    for _ in range(_AHEAD):
        following = None if earlier.before is None else earlier.before()
        if following is None:
            break
        following.bring_back()
        earlier = following
    return tensor
