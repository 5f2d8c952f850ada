"""Staging: copies state from an accelerator to the host in chunks, through two buffers of pinned memory.

While one chunk is hashed or written, the next chunk is copied on a separate stream. Digests, weight files and snapshots
read device tensors here. CPU tensors never pass through a buffer.
"""

from collections.abc import Iterable, Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor

CHUNK_BYTES = 16 * 2**20
"""Size of the largest chunk, and of each buffer."""


def iter_chunks(tensor: Tensor) -> Iterator[Tensor]:
    """Yield views of at most 16 MiB that cover a dense tensor in logical order."""
    if tensor.nbytes <= CHUNK_BYTES:
        yield tensor
        return
    row_bytes = tensor.nbytes // tensor.shape[0]
    parts = tensor.unbind(0) if row_bytes > CHUNK_BYTES else torch.split(tensor, CHUNK_BYTES // row_bytes)
    for part in parts:
        yield from iter_chunks(part)


def can_stage(value: object) -> TypeGuard[Tensor]:
    """Return whether a value is a dense tensor on a device that copies to pinned memory asynchronously."""
    return (
        type(value) is Tensor
        and value.device.type not in ("cpu", "mps", "meta")
        and value.layout is torch.strided
        and not (value.is_nested or value.is_quantized)
        and value.numel() > 0
    )


def staged_chunks(tensors: Iterable[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Yield the content of device tensors in logical order, as (index of the tensor, contiguous chunk on the host).

    A chunk is valid until the next one is requested. All tensors must pass `can_stage`.
    """
    buffers: list[Tensor | None] = [None, None]
    stream: torch.Stream | None = None
    under_way: tuple[int, Tensor, torch.Event] | None = None
    pieces = ((index, piece) for index, tensor in enumerate(tensors) for piece in iter_chunks(tensor.detach()))
    # Two buffers: the device fills one while the caller reads the other. Each copy is queued before the previous chunk
    # is handed out, so that copies overlap with hashing and writing.
    for number, (index, piece) in enumerate(pieces):
        if stream is None or stream.device != piece.device:
            stream = torch.Stream(piece.device)
            # Kernels on the compute stream may still be writing these values.
            stream.wait_stream(torch.accelerator.current_stream(piece.device))
        buffer = buffers[number % 2] = _buffer(buffers[number % 2], piece.nbytes)
        chunk = buffer[: piece.nbytes].view(piece.dtype).view(piece.shape)
        with stream:
            # Make strided and lazily conjugated pieces contiguous on the device, so that one copy moves their bytes.
            chunk.copy_(piece.resolve_conj().resolve_neg().contiguous(), non_blocking=True)
            following = index, chunk, stream.record_event()
        if under_way is not None:
            yield _arrived(under_way)
        under_way = following
    if under_way is not None:
        yield _arrived(under_way)


def _buffer(buffer: Tensor | None, num_bytes: int) -> Tensor:
    # As large as the largest chunk so far: many states have only small tensors.
    if buffer is not None and buffer.numel() >= num_bytes:
        return buffer
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def _arrived(under_way: tuple[int, Tensor, torch.Event]) -> tuple[int, Tensor]:
    index, chunk, event = under_way
    event.synchronize()
    return index, chunk


def on_host(state: object) -> Any:
    """Return a state with the tensors of accelerators in host memory, each copied once.

    Tensors that share their memory on the device share it on the host. Views of a larger storage stay on the device.
    """
    if not torch.accelerator.is_available():
        return state
    originals: dict[int, Tensor] = {}
    _collect(state, originals)
    copies = {
        key: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").view(-1) for key, tensor in originals.items()
    }
    filled = list(copies.values())
    positions = [0] * len(filled)
    for index, chunk in staged_chunks(originals.values()):
        start = positions[index]
        positions[index] += chunk.numel()
        filled[index][start : positions[index]].copy_(chunk.view(-1))
    return _replaced(state, copies) if copies else state


def _collect(node: object, originals: dict[int, Tensor]) -> None:
    if isinstance(node, dict):
        for part in node.values():
            _collect(part, originals)
    elif type(node) in (list, tuple):
        for part in node:  # type: ignore[attr-defined]
            _collect(part, originals)
    elif (key := _whole_storage(node)) is not None:
        assert isinstance(node, Tensor)
        originals.setdefault(key, node)


def _replaced(node: Any, copies: dict[int, Tensor]) -> Any:
    if type(node) is dict:
        return {name: _replaced(part, copies) for name, part in node.items()}
    if isinstance(node, dict):
        # An OrderedDict, or a class with the same constructor; its attributes do not belong to the state.
        return type(node)((name, _replaced(part, copies)) for name, part in node.items())
    if type(node) in (list, tuple):
        return type(node)(_replaced(part, copies) for part in node)
    key = _whole_storage(node)
    if key is None or key not in copies:
        return node
    copy = copies[key] if copies[key].dtype == node.dtype else copies[key].view(node.dtype)
    return copy.view(node.shape)


def _whole_storage(value: object) -> int | None:
    """Return the identity of the storage that a plain tensor fills completely; None for all other values."""
    if not can_stage(value) or value.requires_grad:
        return None
    storage = value.untyped_storage()
    is_whole = value.is_contiguous() and not (value.is_conj() or value.is_neg()) and storage.nbytes() == value.nbytes
    return storage._cdata if is_whole else None
