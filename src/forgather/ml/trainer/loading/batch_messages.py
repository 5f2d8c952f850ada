"""Serialisation of batches to messages between ranks: a pickled header, followed by the raw bytes of the tensors.

Tensors are neither pickled nor copied on the way: `encode` returns views of them, `decode` views of the received buffer.
`DataloaderDispatcher` calls it; `batch_transport` moves the bytes.
"""

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from forgather.ml.trainer.loading.empty_batch import EmptyBatch

# Format of a message:
#
#     8 bytes   Length of the message.
#     8 bytes   Length of the header.
#     header    Pickle of a note and of the batch, with the index, dtype and shape instead of each tensor. Pickle is safe
#               here: the ranks of a job trust each other. A batch may hold any Python value.
#     tensors   Their bytes, each at a multiple of 64, so that a view has the alignment of its dtype.

LENGTH_BYTES = 8
_LENGTHS = 2 * LENGTH_BYTES
_ALIGNMENT = 64
_MOST_KNOWN = 256
_TENSORS_ONLY = b"tensors only"
"""Suffix of descriptions that may be cached. Other descriptions hold Python values, which the receiver might change."""

Pieces = list[bytes | memoryview]
"""Bytes of a message, in order; bytes of tensors are not copied."""


class _Place(NamedTuple):
    """Placeholder for a tensor of the message."""

    number: int


class _Layout(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class _Known:
    """Cache of descriptions: most batches of a run have the same keys, dtypes and shapes."""

    def __init__(self) -> None:
        self._descriptions: dict[Any, Any] = {}

    def get(self, key: object) -> Any:
        return self._descriptions.get(key)

    def add(self, key: object, description: object) -> None:
        # Shapes may differ in every batch, so the cache must be bounded.
        if len(self._descriptions) >= _MOST_KNOWN:
            self._descriptions.clear()
        self._descriptions[key] = description


_written, _read = _Known(), _Known()


def encode(content: object, note: object = None) -> Pieces:
    """Return the bytes of a message for a value, such as a batch, and a small note beside it."""
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
    """Return the message in one buffer."""
    return torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.uint8)


def length_of(message: Tensor) -> int:
    """Return the length of a message from its header; the buffer may hold only the beginning of the message."""
    return int.from_bytes(message.numpy()[:LENGTH_BYTES].tobytes(), "little")


def decode(message: Tensor) -> tuple[Any, Any]:
    """Return the value of a message and its note; tensors are views of the buffer, so do not reuse the buffer."""
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
    """Return the tensors of a value on the CPU, and a pickled description of the value without them."""
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
    """Return the cache key of a plain dict of CPU tensors: names, dtypes and shapes. None for any other value."""
    # Exact types only: a subclass such as EmptyBatch, or a tensor subclass, needs its own description.
    if type(content) is not dict:
        return None
    key = []
    for name, value in content.items():
        if type(value) is not Tensor or value.device.type != "cpu" or value.layout is not torch.strided:
            return None
        key.append((name, value.dtype, value.shape))
    return tuple(key)


def _bytes_of(tensor: Tensor) -> bytes | memoryview:
    # Tensors are viewed as uint8 because NumPy has no bfloat16.
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
                "dispatch_batches=False, so that every rank reads its own batches."
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
    """Return the parts as an `EmptyBatch` if the container is one; all other mappings become dicts."""
    return EmptyBatch(parts) if isinstance(container, EmptyBatch) else parts


def _sequence_like(container: list[Any] | tuple[Any, ...], parts: list[object]) -> object:
    """Return the parts in a container of the same type: list, tuple or named tuple."""
    kind: Callable[..., object] = type(container)
    return kind(*parts) if _is_named_tuple(container) else kind(parts)


def _is_sequence(value: object) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    return type(value) in (list, tuple) or _is_named_tuple(value)


def _is_named_tuple(value: object) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT
