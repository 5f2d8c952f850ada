"""Copies of predictions from the device to host memory, without a host wait per batch.

A batch is copied to pinned memory while the device computes the next one. From there it moves to ordinary memory, so
that the amount of pinned memory is bounded. The collector adds the batches of this rank.
"""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from forgather.ml.trainer.loading.copy_streams import can_pin

_MOST_PINNED = 2**28
"""Bytes of pinned memory. Beyond it, the host waits for the oldest copies, which are long complete by then."""

_Copies = list[Tensor]


class HostCopies:
    """Batches of tensors on their way to host memory.

    With `every`, the device keeps batches and copies that many together. None copies each batch as soon as the device
    has computed it, so that the device holds no earlier batch.
    """

    def __init__(self, every: int | None = None) -> None:
        self._every = every or 1
        self._kept: list[_Copies] = []
        self._under_way: deque[tuple[torch.Event, _Copies]] = deque()
        self._num_pinned = 0
        self._arrived: list[_Copies] = []

    def add(self, tensors: Sequence[Tensor]) -> None:
        # A CUDA graph may overwrite its outputs when it runs again, so batches that stay on the device are copied there.
        stays = self._every > 1
        self._kept.append([one.clone() if stays and can_pin(one.device) else one for one in tensors])
        if len(self._kept) >= self._every:
            self._copy()

    def finish(self) -> list[_Copies]:
        """Return all batches in host memory, in order. The host waits for the last copies."""
        self._copy()
        self._take(0)
        arrived, self._arrived = self._arrived, []
        return arrived

    def _copy(self) -> None:
        kept, self._kept = self._kept, []
        for tensors in kept:
            device = next((one.device for one in tensors if can_pin(one.device)), None)
            if device is None:
                self._take(0)
                self._arrived.append([_owned(one.cpu()) for one in tensors])
                continue
            # On the stream of the computation, before a CUDA graph can overwrite its outputs.
            copies = [_pinned(one) if can_pin(one.device) else _owned(one.cpu()) for one in tensors]
            event = torch.Event(device)
            event.record()
            self._under_way.append((event, copies))
            self._num_pinned += _num_bytes(copies)
            self._take(1)

    def _take(self, num_left: int) -> None:
        """Move the oldest batches to ordinary memory: all beyond the limit of pinned memory, or all with `num_left=0`."""
        while len(self._under_way) > num_left and (num_left == 0 or self._num_pinned > _MOST_PINNED):
            event, copies = self._under_way.popleft()
            event.synchronize()
            self._num_pinned -= _num_bytes(copies)
            self._arrived.append([one.clone() if one.is_pinned() else one for one in copies])


def _pinned(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _owned(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if it would keep other memory alive."""
    # A slice keeps its full tensor. Batches of dataloader workers are in shared memory, with one file descriptor each.
    is_part = tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    return tensor.clone() if is_part or tensor.is_shared() else tensor


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)
