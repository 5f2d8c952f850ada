"""Copy streams: transfers between host and accelerator that overlap with compute.

A copy from or to pinned memory on a separate stream runs while the compute stream works. Input batches and offloaded
activations use separate streams, so that neither waits for the other.
"""

import functools

import torch


def can_pin(device: torch.device) -> bool:
    """Return whether pinned host memory makes copies to and from the device asynchronous."""
    # The memory of MPS is host memory.
    return device.type not in ("cpu", "mps", "meta")


def copy_stream(device: torch.device, purpose: str) -> torch.Stream:
    """Return the stream of this device for one kind of copies."""
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    return _stream(device.type, index, purpose)


def tracks_streams(device: torch.device) -> bool:
    """Return whether the device implements `Tensor.record_stream`: memory of one stream that another stream uses."""
    key = torch._C._dispatch_key_for_device(device.type)
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::record_stream", key)


@functools.cache
def _stream(kind: str, index: int, purpose: str) -> torch.Stream:
    return torch.Stream(torch.device(kind, index))
