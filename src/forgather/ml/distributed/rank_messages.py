"""Messages between ranks: values as JSON, followed by the raw bytes of tensors and arrays.

Nobody authenticates what arrives from the network, so decoding runs no code, whoever wrote the bytes: there is no pickle,
and classes are only looked up among those that this process has imported. `Peers` and `DataloaderDispatcher` use it.
`encode` returns views of tensors, and `decode` views of the received buffer.
"""

import contextlib
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

# Format of a message:
#
#     8 bytes   Length of the message.
#     8 bytes   Length of the header.
#     header    The value as JSON. Text, numbers, booleans and None stay as they are, a dict whose keys are text is an
#               object, and any other value is an array that begins with its tag.
#     blobs     Bytes of tensors, arrays and byte strings, each at a multiple of 64, so that a view has the alignment of
#               its dtype. The header has their lengths, in the same order.

LENGTH_BYTES = 8
_LENGTHS = 2 * LENGTH_BYTES
_ALIGNMENT = 64
T = TypeVar("T")
_ATOMS = frozenset({str, int, bool, float, type(None)})

Pieces = list[bytes | memoryview]
"""Bytes of a message, in order; bytes of tensors are not copied."""

_registered: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {}


def register_type(kind: type[T], parts: Callable[[T], Any], make: Callable[[Any], T]) -> None:
    """Let objects of exactly this class travel as `parts(value)`, from which `make` makes them again."""
    _registered[kind.__qualname__] = kind, parts, make


class UnsupportedValueError(TypeError):
    """Value that cannot be sent. `keys` leads to it."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.keys: list[object] = []

    def __str__(self) -> str:
        place = f", at {'.'.join(map(str, self.keys))}" if self.keys else ""
        return (
            f"{self.args[0]} cannot be sent to other ranks{place}. Send numbers, text, bytes, dense tensors, NumPy arrays, "
            "dataclasses, enums, and containers of them. For values of a batch, set dispatch_batches=False instead, so that "
            "every rank reads its own batches."
        )


def encode(value: object) -> Pieces:
    """Return the bytes of a message; raise `UnsupportedValueError` for a value that it cannot hold."""
    blobs: list[bytes | memoryview] = []
    try:
        header = json.dumps(_plain(value, blobs), separators=(",", ":")).encode()
    except RecursionError:
        raise UnsupportedValueError("A value with very deep nesting") from None
    pieces: Pieces = [b"", header]
    position = _LENGTHS + len(header)
    for blob in blobs:
        pieces += [b"\0" * (-position % _ALIGNMENT), blob]
        position = _aligned(position) + len(blob)
    pieces[0] = position.to_bytes(LENGTH_BYTES, "little") + len(header).to_bytes(LENGTH_BYTES, "little")
    return pieces


def sendable(values: Mapping[str, T]) -> dict[str, T]:
    """Return the values that a message can hold."""
    found = {}
    for name, value in values.items():
        with contextlib.suppress(UnsupportedValueError):
            encode(value)
            found[name] = value
    return found


def packed(pieces: Sequence[bytes | memoryview]) -> Tensor:
    """Return the message in one buffer."""
    return torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.uint8)


def length_of(message: Tensor) -> int:
    """Return the length of a message from its header; the buffer may hold only the beginning of the message."""
    return int.from_bytes(message.numpy()[:LENGTH_BYTES].tobytes(), "little")


def decode(message: Tensor) -> Any:
    """Return the value of a message; tensors are views of the buffer, so do not reuse the buffer."""
    array = message.numpy()
    end = _LENGTHS + int.from_bytes(array[LENGTH_BYTES:_LENGTHS].tobytes(), "little")
    return _Reader(message, end).value(json.loads(array[_LENGTHS:end].tobytes()))


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT


# --- writing


def _plain(value: Any, blobs: list[bytes | memoryview]) -> Any:
    """Return a value as JSON can express it, and append its bytes to the blobs."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    write = _WRITERS.get(kind)
    if write is not None:
        return write(value, blobs)
    if kind.__qualname__ in _registered and _registered[kind.__qualname__][0] is kind:
        return ["registered", kind.__qualname__, _plain(_registered[kind.__qualname__][1](value), blobs)]
    if isinstance(value, Tensor):
        return _plain_tensor(value, blobs)
    if isinstance(value, Enum):
        return ["enum", *_class_name(kind), value.name]
    if isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray):
        return _plain_array(value, blobs)
    if isinstance(value, np.generic):
        return ["number", _plain_array(np.asarray(value), blobs)]
    if isinstance(value, Mapping):
        return _plain_mapping(value, blobs)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return ["named", *_class_name(kind), *(_plain(part, blobs) for part in value)]
    if dataclasses.is_dataclass(kind):
        names = [one.name for one in dataclasses.fields(kind) if hasattr(value, one.name)]
        return ["data", *_class_name(kind), _plain_mapping({name: getattr(value, name) for name in names}, blobs)]
    raise UnsupportedValueError(f"A value of type {kind.__module__}.{kind.__qualname__}")


def _plain_mapping(value: Mapping[Any, Any], blobs: list[bytes | memoryview]) -> Any:
    parts: dict[Any, Any] = {}
    has_text_keys = True
    for key, part in value.items():
        has_text_keys = has_text_keys and type(key) is str
        try:
            parts[key] = part if type(part) in _ATOMS else _plain(part, blobs)
        except UnsupportedValueError as error:
            error.keys.insert(0, key)
            raise
    if has_text_keys:
        return parts
    return ["dict", *([_plain(key, blobs), part] for key, part in parts.items())]


def _plain_blob(content: bytes | memoryview, blobs: list[bytes | memoryview]) -> int:
    blobs.append(content)
    return len(content)


def _plain_tensor(value: Tensor, blobs: list[bytes | memoryview]) -> list[Any]:
    if value.layout is not torch.strided or value.is_quantized or value.is_nested:
        raise UnsupportedValueError("A nested tensor" if value.is_nested else f"A tensor of layout {value.layout}")
    if value.is_meta:
        raise UnsupportedValueError("A tensor without data (device meta)")
    dense = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # Viewed as bytes, because NumPy has no bfloat16. A contiguous tensor of one element may have any stride.
    content: Any = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy() if dense.numel() else b""
    return ["tensor", _dtype_name(value.dtype), list(value.shape), _plain_blob(memoryview(content), blobs)]


@functools.cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _plain_array(value: np.ndarray, blobs: list[bytes | memoryview]) -> list[Any]:
    if value.dtype.hasobject:
        return ["objects", list(value.shape), *(_plain(part, blobs) for part in value.reshape(-1).tolist())]
    if value.dtype.fields is not None:
        raise UnsupportedValueError("An array of records")
    return ["array", value.dtype.str, list(value.shape), _plain_blob(value.tobytes(), blobs)]


def _class_name(kind: type) -> tuple[str, str]:
    name = kind.__module__, kind.__qualname__
    if _imported_class(*name) is not kind:
        raise UnsupportedValueError(f"A value of the class {'.'.join(name)}, which no module has under this name,")
    return name


def _imported_class(module: str, name: str) -> type | None:
    """Return a class of an imported module; nothing is imported, and no attribute is computed."""
    place: object = sys.modules.get(module)
    for part in name.split("."):
        place = None if place is None else vars(place).get(part)
        if not isinstance(place, type):
            return None
    return place if isinstance(place, type) else None


def _sequence(tag: str) -> Callable[[Any, list[bytes | memoryview]], Any]:
    return lambda value, blobs: [tag, *[part if type(part) in _ATOMS else _plain(part, blobs) for part in value]]


def _text(tag: str, text: Callable[[Any], str] = str) -> Callable[[Any, list[bytes | memoryview]], Any]:
    return lambda value, _: [tag, text(value)]


_WRITERS: dict[type, Callable[[Any, list[bytes | memoryview]], Any]] = {
    Tensor: _plain_tensor,
    dict: _plain_mapping,
    list: _sequence("list"),
    tuple: _sequence("tuple"),
    set: _sequence("set"),
    frozenset: _sequence("frozenset"),
    torch.Size: _sequence("size"),
    bytes: lambda value, blobs: ["bytes", _plain_blob(value, blobs)],
    complex: lambda value, _: ["complex", value.real, value.imag],
    torch.dtype: _text("dtype", _dtype_name),
    torch.device: _text("device"),
}


# --- reading


class _Reader:
    """Reader of one message, whose blobs are taken in order."""

    def __init__(self, message: Tensor, end_of_header: int) -> None:
        self._message = message
        self._position = end_of_header

    def value(self, plain: Any) -> Any:
        if type(plain) is dict:
            return {name: part if type(part) in _ATOMS else self.value(part) for name, part in plain.items()}
        if type(plain) is not list:
            return plain
        tag, *parts = plain
        if tag in _CONTAINERS:
            return _CONTAINERS[tag]([part if type(part) in _ATOMS else self.value(part) for part in parts])
        read: Callable[..., Any] = getattr(self, f"_read_{tag}")
        return read(*parts)

    def _read_dict(self, *pairs: tuple[Any, Any]) -> dict[Any, Any]:
        # Parts were written before the keys, and blobs come in the order of writing.
        parts = [self.value(part) for _, part in pairs]
        return dict(zip([self.value(key) for key, _ in pairs], parts, strict=True))

    def _read_registered(self, name: str, parts: Any) -> Any:
        return _registered[name][2](self.value(parts))

    def _read_bytes(self, length: int) -> bytes:
        return self._blob(length).numpy().tobytes()

    def _read_complex(self, real: float, imaginary: float) -> complex:
        return complex(real, imaginary)

    def _read_dtype(self, name: str) -> torch.dtype:
        found = vars(torch).get(name)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"a message of another rank has the unknown dtype {name!r}")
        return found

    def _read_device(self, name: str) -> torch.device:
        return torch.device(name)

    def _read_tensor(self, dtype: str, shape: list[int], length: int) -> Tensor:
        kind = self._read_dtype(dtype)
        blob = self._blob(length)
        # A buffer without elements cannot be viewed as another dtype.
        return blob.view(kind).view(shape) if length else torch.empty(shape, dtype=kind, device="cpu")

    def _read_array(self, dtype: str, shape: list[int], length: int) -> np.ndarray:
        return np.frombuffer(self._read_bytes(length), dtype=np.dtype(dtype)).reshape(shape).copy()

    def _read_objects(self, shape: list[int], *parts: Any) -> np.ndarray:
        array = np.empty(len(parts), dtype=object)
        array[:] = [self.value(part) for part in parts]
        return array.reshape(shape)

    def _read_number(self, array: list[Any]) -> Any:
        return self.value(array)[()]

    def _read_enum(self, module: str, name: str, member: str) -> Enum:
        found: Enum = _class_of(module, name, Enum)[member]
        return found

    def _read_named(self, module: str, name: str, *parts: Any) -> Any:
        # Not by the constructor, which may be the user's.
        return tuple.__new__(_class_of(module, name, tuple), map(self.value, parts))

    def _read_data(self, module: str, name: str, fields: Mapping[str, Any]) -> Any:
        kind: Any = _class_of(module, name, object)
        is_data = dataclasses.is_dataclass(kind)
        if not is_data:
            raise ValueError(f"a message of another rank has {module}.{name}, which is no dataclass")
        made: Any = object.__new__(kind)
        for one in dataclasses.fields(kind):
            if one.name in fields:
                object.__setattr__(made, one.name, self.value(fields[one.name]))
        return made

    def _blob(self, length: int) -> Tensor:
        start = _aligned(self._position)
        self._position = start + length
        return self._message[start : self._position]


def _class_of(module: str, name: str, base: type) -> Any:
    found = _imported_class(module, name)
    if found is None or not issubclass(found, base):
        raise ValueError(
            f"a message of another rank has a value of {module}.{name}, which this rank has not imported. Import it on all "
            "ranks."
        )
    return found


_CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "size": torch.Size,
}
