"""Batches as messages: a header that describes the batch, and the bytes of its tensors behind it.

8 bytes   length of the whole message
8 bytes   length of the header
header    a note, and the batch with numbers in place of its tensors, their dtypes and shapes (pickled: ranks of one
          job trust each other, and a batch may hold any Python value)
tensors   their bytes, each at a multiple of 64
"""

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from forgather.ml.trainer.loading.empty_batch import EmptyBatch

LENGTH_BYTES = 8
_LENGTHS = 2 * LENGTH_BYTES
_ALIGNMENT = 64
_MOST_KNOWN = 256
_TENSORS_ONLY = b"tensors only"
"""Behind descriptions that may be read once for all; other values might be changed by whoever gets them."""

Pieces = list[bytes | memoryview]
"""The bytes of a message, in order; those of tensors are not copied."""


class _Place(NamedTuple):
    """Where a tensor of the message is to go."""

    number: int


class _Layout(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class _Known:
    """Descriptions that were made or read before: batches mostly look alike."""

    def __init__(self) -> None:
        self._descriptions: dict[Any, Any] = {}

    def get(self, key: object) -> Any:
        return self._descriptions.get(key)

    def add(self, key: object, description: object) -> None:
        if len(self._descriptions) >= _MOST_KNOWN:
            self._descriptions.clear()
        self._descriptions[key] = description


_written, _read = _Known(), _Known()


def encode(content: object, note: object = None) -> Pieces:
    """A value, such as a batch, and a small note beside it as the bytes of a message."""
    tensors, description = _describe(content)
    header = pickle.dumps((note, description), protocol=pickle.HIGHEST_PROTOCOL)
    pieces: Pieces = [b"", header]
    position = _LENGTHS + len(header)
    for tensor in tensors:
        padding = -position % _ALIGNMENT
        content_bytes = _bytes_of(tensor)
        pieces += [b"\0" * padding, content_bytes]
        position += padding + len(content_bytes)
    pieces[0] = position.to_bytes(LENGTH_BYTES, "little") + len(header).to_bytes(LENGTH_BYTES, "little")
    return pieces


def packed(pieces: Sequence[bytes | memoryview]) -> Tensor:
    """The message in one buffer."""
    return torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.uint8)


def length_of(message: Tensor) -> int:
    """The length that a message says it has, of which the buffer may hold only the beginning."""
    return int.from_bytes(message.numpy()[:LENGTH_BYTES].tobytes(), "little")


def decode(message: Tensor) -> tuple[Any, Any]:
    """The value of a message and its note; tensors are views of the buffer, which must not be used again."""
    array = message.numpy()
    header_length = int.from_bytes(array[LENGTH_BYTES:_LENGTHS].tobytes(), "little")
    note, description = pickle.loads(array[_LENGTHS : _LENGTHS + header_length].tobytes())
    known = _read.get(description)
    if known is None:
        known = pickle.loads(description)
        if description.endswith(_TENSORS_ONLY):
            _read.add(description, known)
    skeleton, layouts = known
    first = _aligned(_LENGTHS + header_length)
    return _with_tensors(skeleton, [_view(message, first, layout) for layout in layouts]), note


def _describe(content: Any) -> tuple[list[Tensor], bytes]:
    """The tensors of a value on the CPU, in a row, and a description of what is left without them."""
    key = _key_of(content)
    description: bytes | None = None if key is None else _written.get(key)
    tensors: list[Tensor] = []
    if description is not None:
        tensors = [tensor.detach().contiguous() for tensor in content.values()]
        return tensors, description
    skeleton = _without_tensors(content, tensors)
    layouts: list[_Layout] = []
    end = 0
    for tensor in tensors:
        start = _aligned(end)
        end = start + tensor.numel() * tensor.element_size()
        layouts.append(_Layout(tensor.dtype, tuple(tensor.shape), start, end - start))
    description = pickle.dumps((skeleton, layouts), protocol=pickle.HIGHEST_PROTOCOL)
    if key is not None:
        description += _TENSORS_ONLY
        _written.add(key, description)
    return tensors, description


def _key_of(content: object) -> Any:
    """What tells the description of a plain dict of tensors from others; None for anything else."""
    if type(content) is not dict:
        return None
    key = []
    for name, value in content.items():
        if type(value) is not Tensor or value.device.type != "cpu" or value.layout is not torch.strided:
            return None
        key.append((name, value.dtype, value.shape))
    return tuple(key)


def _bytes_of(tensor: Tensor) -> bytes | memoryview:
    if tensor.numel() == 0:
        return b""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _view(message: Tensor, first: int, layout: _Layout) -> Tensor:
    if layout.num_bytes == 0:
        return torch.empty(layout.shape, dtype=layout.dtype, device="cpu")
    start = first + layout.start
    return message[start : start + layout.num_bytes].view(layout.dtype).view(layout.shape)


def _without_tensors(value: object, tensors: list[Tensor]) -> object:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise TypeError(
                f"A batch with a tensor of layout {value.layout} cannot be sent to other ranks: make it dense, or set "
                "dispatch_batches=False, with which every rank reads its own batches."
            )
        tensors.append(value.detach().cpu().contiguous())
        return _Place(len(tensors) - 1)
    if isinstance(value, Mapping):
        return _mapping_like(value, {name: _without_tensors(part, tensors) for name, part in value.items()})
    if _is_sequence(value):
        return _sequence_like(value, [_without_tensors(part, tensors) for part in value])
    return value


def _with_tensors(value: object, tensors: list[Tensor]) -> object:
    if isinstance(value, _Place):
        return tensors[value.number]
    if isinstance(value, dict):
        return _mapping_like(value, {name: _with_tensors(part, tensors) for name, part in value.items()})
    if _is_sequence(value):
        return _sequence_like(value, [_with_tensors(part, tensors) for part in value])
    return value


def _mapping_like(container: object, parts: dict[str, object]) -> dict[str, object]:
    """The parts as an `EmptyBatch` if the container is one; other kinds of mappings mean nothing to a trainer."""
    return EmptyBatch(parts) if isinstance(container, EmptyBatch) else parts


def _sequence_like(container: list[Any] | tuple[Any, ...], parts: list[object]) -> object:
    """The parts in a container of the same type: list, tuple or named tuple."""
    kind: Callable[..., object] = type(container)
    return kind(*parts) if _is_named_tuple(container) else kind(parts)


def _is_sequence(value: object) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    return type(value) in (list, tuple) or _is_named_tuple(value)


def _is_named_tuple(value: object) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT
