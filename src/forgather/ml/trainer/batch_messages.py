"""Batches as messages: a header that describes the batch, and its tensors in one buffer behind it.

8 bytes   length of the whole message
8 bytes   length of the header
header    the batch with numbers in place of its tensors, their dtypes and shapes (pickled: ranks of one job trust
          each other, and a batch may hold any Python value)
tensors   their bytes, each at a multiple of 64
"""

import pickle
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forgather.ml.trainer.empty_batch import EmptyBatch

_ALIGNMENT = 64
_LENGTHS = 16


class _Place(NamedTuple):
    """Where a tensor of the message is to go."""

    number: int


class _Layout(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def encode(value: Any) -> Tensor:
    """A value as one buffer of bytes on the CPU."""
    tensors: list[Tensor] = []
    skeleton = _without_tensors(value, tensors)
    layouts: list[_Layout] = []
    end = 0
    for tensor in tensors:
        start = _aligned(end)
        end = start + tensor.numel() * tensor.element_size()
        layouts.append(_Layout(tensor.dtype, tuple(tensor.shape), start, end - start))
    header = pickle.dumps((skeleton, layouts), protocol=pickle.HIGHEST_PROTOCOL)
    first = _aligned(_LENGTHS + len(header))
    message = torch.empty(first + end, dtype=torch.uint8, device="cpu")
    lengths = (first + end).to_bytes(8, "little") + len(header).to_bytes(8, "little")
    _as_numpy(message)[: _LENGTHS + len(header)] = bytearray(lengths + header)
    for tensor, layout in zip(tensors, layouts, strict=True):
        if layout.num_bytes:
            start = first + layout.start
            message[start : start + layout.num_bytes].copy_(tensor.reshape(-1).view(torch.uint8))
    return message


def length_of(message: Tensor) -> int:
    """The length that a message says it has, of which the buffer may hold only the beginning."""
    return int.from_bytes(bytes(_as_numpy(message)[:8]), "little")


def decode(message: Tensor) -> Any:
    """The value of a message; its tensors are views of the buffer, which must not be used again."""
    header_length = int.from_bytes(bytes(_as_numpy(message)[8:_LENGTHS]), "little")
    first = _aligned(_LENGTHS + header_length)
    skeleton, layouts = pickle.loads(bytes(_as_numpy(message)[_LENGTHS : _LENGTHS + header_length]))
    return _with_tensors(skeleton, [_view(message, first, layout) for layout in layouts])


def _view(message: Tensor, first: int, layout: _Layout) -> Tensor:
    if layout.num_bytes == 0:
        return torch.empty(layout.shape, dtype=layout.dtype, device="cpu")
    start = first + layout.start
    return message[start : start + layout.num_bytes].view(layout.dtype).view(layout.shape)


def _without_tensors(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise TypeError(
                f"A batch with a tensor of layout {value.layout} cannot be sent to other ranks: make it dense, or set "
                "dispatch_batches=False, with which every rank reads its own batches."
            )
        tensors.append(value.detach().cpu().contiguous())
        return _Place(len(tensors) - 1)
    if isinstance(value, Mapping):
        return _like(value, {name: _without_tensors(part, tensors) for name, part in value.items()})
    if type(value) in (list, tuple) or _is_named_tuple(value):
        return _like(value, [_without_tensors(part, tensors) for part in value])
    return value


def _with_tensors(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, _Place):
        return tensors[value.number]
    if isinstance(value, dict):
        return _like(value, {name: _with_tensors(part, tensors) for name, part in value.items()})
    if type(value) in (list, tuple) or _is_named_tuple(value):
        return _like(value, [_with_tensors(part, tensors) for part in value])
    return value


def _like(container: Any, parts: Any) -> Any:
    """The parts in a container like that one; of mappings only those are kept that mean something to a trainer."""
    if isinstance(container, Mapping):
        return EmptyBatch(parts) if isinstance(container, EmptyBatch) else parts
    kind = type(container)
    return kind(*parts) if _is_named_tuple(container) else kind(parts)


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT


def _as_numpy(message: Tensor) -> Any:
    return message.numpy()
