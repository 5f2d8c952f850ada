"""Streamed writer of `.pt` files: the zip archive of `torch.save`, with tensors that are written chunk by chunk.

`torch.save` needs every tensor in memory. Here the content of a sharded tensor comes from an iterator, and `torch.load`
reads the file as usual. `write_state` writes all state files through this module; `TorchArchive` reads them.
"""

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from forgather.ml.checkpoint.encoding.staging import can_stage, staged_chunks

Chunks = Iterator[memoryview]

_ROOT = "archive"
_ALIGNMENT = 64
_PROTOCOL = 2
_VERSION = b"3\n"
_NEEDS_ZIP64 = 45
_BIG = 0xFFFFFFFF
_MANY = 0xFFFF
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_ENTRY = struct.Struct("<IHHHHHHIIIHHHHHII")
_END = struct.Struct("<IHHHHIIH")
_END_64 = struct.Struct("<IQHHIIQQQQ")
_LOCATOR = struct.Struct("<IIQI")
_PADDING = 0x4246
"""Id of torch's padding field."""


class Output(Protocol):
    """Stream of bytes, such as `HashingWriter`."""

    def write(self, data: memoryview | bytes) -> int: ...


class _LateStorage(NamedTuple):
    """Storage of a tensor with content that is read when the archive is written."""

    tensor: Any


class _Pickler(pickle.Pickler):
    """Pickler that writes tensors as `torch.save` does, and collects their storages in order."""

    def __init__(self, file: io.BytesIO, is_late: Callable[[object], bool]) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self._is_late = is_late
        self.storages: dict[int, torch.UntypedStorage | _LateStorage] = {}
        self._numbers: dict[int, int] = {}

    def reducer_override(self, value: Any) -> Any:
        if not self._is_late(value):
            return NotImplemented
        stride = torch.empty(value.shape, device="meta").stride()
        hooks: OrderedDict[str, object] = OrderedDict()
        return torch._utils._rebuild_tensor_v2, (_LateStorage(value), 0, tuple(value.shape), stride, False, hooks)

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, _LateStorage):
            tensor = value.tensor
            kind = getattr(torch, _storage_classes()[tensor.dtype])
            return "storage", kind, self._number(id(tensor), value), "cpu", tensor.numel()
        if isinstance(value, torch.storage.TypedStorage):
            kind, content, length = getattr(torch, value._pickle_storage_type()), value._untyped_storage, value._size()
        elif isinstance(value, torch.UntypedStorage):
            kind, content, length = torch.UntypedStorage, value, value.nbytes()
        else:
            return None
        return "storage", kind, self._number(content._cdata, content), "cpu", length

    def _number(self, identity: int, storage: torch.UntypedStorage | _LateStorage) -> str:
        number = self._numbers.setdefault(identity, len(self._numbers))
        self.storages.setdefault(number, storage)
        return str(number)


class _Entry(NamedTuple):
    name: bytes
    offset: int
    size: int


class StateArchive:
    """Encoded state, ready to be written. `late_tensors` are written from the iterators of `chunks_of`, in this order."""

    def __init__(self, encoded: object, is_late: Callable[[object], bool] = lambda _: False) -> None:
        file = io.BytesIO()
        pickler = _Pickler(file, is_late)
        pickler.dump(encoded)
        self._pickle = file.getvalue()
        self._storages = pickler.storages

    @property
    def late_tensors(self) -> list[Any]:
        return [one.tensor for one in self._storages.values() if isinstance(one, _LateStorage)]

    def write(self, output: Output, chunks_of: Callable[[Any], Chunks] | None = None) -> None:
        writer = _ZipWriter(output)
        writer.add("data.pkl", len(self._pickle), iter([memoryview(self._pickle)]))
        writer.add("byteorder", len(b"little"), iter([memoryview(b"little")]))
        for number, storage in self._storages.items():
            if isinstance(storage, _LateStorage):
                assert chunks_of is not None, "the archive has tensors without content"
                tensor = storage.tensor
                writer.add(f"data/{number}", tensor.numel() * tensor.element_size(), chunks_of(tensor))
            else:
                writer.add(f"data/{number}", storage.nbytes(), _content_of(storage))
        writer.add("version", len(_VERSION), iter([memoryview(_VERSION)]))
        writer.finish()


class _ZipWriter:
    """Zip archive with uncompressed records. The content of each record begins at a multiple of 64 bytes."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._position = 0
        self._entries: list[_Entry] = []

    def add(self, name: str, size: int, chunks: Chunks) -> None:
        full_name = f"{_ROOT}/{name}".encode()
        entry = _Entry(full_name, self._position, size)
        self._entries.append(entry)
        extra = _sizes_field([size, size]) if size >= _BIG else b""
        start = self._position + _LOCAL.size + len(full_name) + len(extra)
        # The header of a field has four bytes.
        padding = -(start + 4) % _ALIGNMENT
        extra += struct.pack("<HH", _PADDING, padding) + b"Z" * padding
        short = min(size, _BIG)
        # Readers of checkpoints do not check the CRC. The manifest has a stronger checksum of the file.
        header = _LOCAL.pack(0x04034B50, _NEEDS_ZIP64, 0, 0, 0, 0, 0, short, short, len(full_name), len(extra))
        self._write(header + full_name + extra)
        begin = self._position
        for chunk in chunks:
            self._write(chunk)
        assert self._position - begin == size, f"record {name} has {self._position - begin} bytes instead of {size}"

    def finish(self) -> None:
        start = self._position
        for entry in self._entries:
            self._write(_directory_entry(entry))
        size, count = self._position - start, len(self._entries)
        if start >= _BIG or count >= _MANY:
            end = self._position
            self._write(_END_64.pack(0x06064B50, 44, _NEEDS_ZIP64, _NEEDS_ZIP64, 0, 0, count, count, size, start))
            self._write(_LOCATOR.pack(0x07064B50, 0, end, 1))
        short = min(count, _MANY)
        self._write(_END.pack(0x06054B50, 0, 0, short, short, min(size, _BIG), min(start, _BIG), 0))

    def _write(self, data: memoryview | bytes) -> None:
        self._output.write(data)
        self._position += len(data)


def _directory_entry(entry: _Entry) -> bytes:
    # Only the numbers that do not fit 32 bits are in the field, in the order size, stored size, offset.
    large = [number for number in (entry.size, entry.size, entry.offset) if number >= _BIG]
    extra = _sizes_field(large) if large else b""
    short, offset = min(entry.size, _BIG), min(entry.offset, _BIG)
    fields = (0x02014B50, _NEEDS_ZIP64, _NEEDS_ZIP64, 0, 0, 0, 0, 0, short, short, len(entry.name), len(extra))
    return _ENTRY.pack(*fields, 0, 0, 0, 0, offset) + entry.name + extra


def _sizes_field(numbers: list[int]) -> bytes:
    return struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers)


def _content_of(storage: torch.UntypedStorage) -> Chunks:
    if not storage.nbytes():
        return
    content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    if can_stage(content):
        for _, chunk in staged_chunks([content]):
            yield memoryview(chunk.numpy())  # type: ignore[arg-type]
    else:
        yield memoryview(content.cpu().numpy())  # type: ignore[arg-type]


def can_be_late(tensor: Tensor) -> bool:
    """Return whether the content of a tensor of this dtype can be written late."""
    return tensor.dtype in _storage_classes()


def _storage_classes() -> dict[torch.dtype, str]:
    names: dict[torch.dtype, str] = torch.storage._dtype_to_storage_type_map()
    return names
