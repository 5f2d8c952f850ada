"""Strict reader of the zip archives that `torch.save` writes: uncompressed records that do not overlap.

torch's reader also inflates compressed records, and of two central directories it uses the first that it finds.
`PlainUnpickler` reads the `.pt` and `.bin` files of a checkpoint through this module. `torch.load` can still read them.
"""

import struct
from dataclasses import dataclass
from typing import Protocol

from forgather.ml.checkpoint.encoding.state_budget import MemoryBudget
from forgather.ml.checkpoint.errors import StateDecodingError

_END = struct.Struct("<IHHHHIIH")
_END_MARK = 0x06054B50
_LOCATOR = struct.Struct("<IIQI")
_LOCATOR_MARK = 0x07064B50
_END_64 = struct.Struct("<IQHHIIQQQQ")
_END_64_MARK = 0x06064B50
_ENTRY = struct.Struct("<IHHHHHHIIIHHHHHII")
_ENTRY_MARK = 0x02014B50
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_LOCAL_MARK = 0x04034B50
_EXTRA_64 = 1
_IN_EXTRA = 0xFFFFFFFF
_ENCRYPTED = 1
# Memory of the Python objects for one directory entry.
_ENTRY_BYTES = 400


class ArchiveSource(Protocol):
    """Bytes of an archive: a full file, or a byte range of a file."""

    size: int

    def seek(self, offset: int, /) -> int: ...

    def readinto(self, buffer: memoryview, /) -> int: ...


@dataclass(frozen=True)
class _Record:
    """Location of a record: offset of its local header, its size, and the offset where the next item begins."""

    name: bytes
    header: int
    size: int
    limit: int


class TorchArchive:
    """Archive with access to its records by name, without the archive's root folder in front."""

    def __init__(self, reader: ArchiveSource, budget: MemoryBudget) -> None:
        self._reader = reader
        self._budget = budget
        start, size, count = self._find_directory()
        entries = self._read_entries(start, size, count)
        self._root = _root_of(entries)
        self._records = _with_limits(entries, start)
        if self._read_small("byteorder", b"little") != b"little":
            raise StateDecodingError("it was written on a machine with a different byte order")

    def size_of(self, name: str) -> int:
        """Return the size of a record in bytes."""
        return self._record(name).size

    def offset_of(self, name: str) -> int:
        """Return the offset of a record's content in the file; the record is checked as in `read_into`."""
        return self._seek_content(self._record(name))

    def read_into(self, name: str, out: memoryview) -> None:
        """Fill `out` with the content of a record; `out` must have the record's size."""
        record = self._record(name)
        self._seek_content(record)
        if self._reader.readinto(out) != record.size:
            raise StateDecodingError(f"record {name!r} is truncated")

    def read(self, name: str) -> bytearray:
        """Return the content of a record."""
        self._budget.spend(self.size_of(name))
        content = bytearray(self.size_of(name))
        self.read_into(name, memoryview(content))
        return content

    def _read_small(self, name: str, default: bytes) -> bytes:
        full_name = self._root + name.encode()
        return bytes(self.read(name)) if full_name in self._records else default

    def _record(self, name: str) -> _Record:
        record = self._records.get(self._root + name.encode())
        if record is None:
            raise StateDecodingError(f"record {name[:100]!r} is missing")
        return record

    def _seek_content(self, record: _Record) -> int:
        # A zip file describes each record twice. Only the local header has the offset of the content, so it must agree
        # with the directory.
        fields = _LOCAL.unpack(self._bytes_at(record.header, _LOCAL.size))
        mark, flags, method, name_size, extra_size = fields[0], fields[2], fields[3], fields[9], fields[10]
        start = record.header + _LOCAL.size
        if mark != _LOCAL_MARK or method or flags & _ENCRYPTED or self._bytes_at(start, name_size) != record.name:
            raise StateDecodingError(
                f"record {record.name!r} is not where its directory entry points, or is compressed"
            )
        start += name_size + extra_size
        # Overlapping records would let a small file expand to any size.
        if start + record.size > record.limit:
            raise StateDecodingError(f"record {record.name!r} overlaps the next record")
        return self._reader.seek(start)

    def _find_directory(self) -> tuple[int, int, int]:
        """Return offset, size and number of entries of the central directory, which must touch the end records."""
        # Exactly at the end of the file. Zip allows a comment there, which could hide a second directory.
        end = self._reader.size - _END.size
        mark, disk, first_disk, _, count, size, start, comment = _END.unpack(self._bytes_at(end, _END.size))
        if mark != _END_MARK or disk or first_disk or comment:
            raise StateDecodingError(
                "it is not an archive of torch.save (convert files from before torch 1.6 with "
                "torch.save(torch.load(path, weights_only=True), path))"
            )
        locator = end - _LOCATOR.size
        # Archives with large sizes have a second end record (zip64), and a locator that points to it.
        if locator >= 0:
            mark, _, end_64, _ = _LOCATOR.unpack(self._bytes_at(locator, _LOCATOR.size))
            if mark == _LOCATOR_MARK:
                end = locator - _END_64.size
                if end != end_64:
                    raise StateDecodingError("its end records are not adjacent")
                fields = _END_64.unpack(self._bytes_at(end, _END_64.size))
                mark, count, size, start = fields[0], fields[7], fields[8], fields[9]
                if mark != _END_64_MARK:
                    raise StateDecodingError("its end records are not adjacent")
        if start + size != end:
            raise StateDecodingError("its directory does not end where its end records begin")
        return start, size, count

    def _read_entries(self, start: int, size: int, count: int) -> dict[bytes, tuple[int, int]]:
        self._budget.spend(size)
        data = self._bytes_at(start, size)
        entries: dict[bytes, tuple[int, int]] = {}
        position = 0
        for _ in range(count):
            self._budget.spend(_ENTRY_BYTES)
            name, place, position = _entry_at(data, position)
            if name in entries:
                raise StateDecodingError(f"record {name!r} occurs twice")
            entries[name] = place
        if position != size:
            raise StateDecodingError("the size of its directory does not match its number of entries")
        return entries

    def _bytes_at(self, offset: int, count: int) -> bytes:
        if not 0 <= offset <= offset + count <= self._reader.size:
            raise StateDecodingError("it is not an archive of torch.save, or is truncated")
        self._reader.seek(offset)
        out = bytearray(count)
        if self._reader.readinto(memoryview(out)) != count:
            raise StateDecodingError("it is truncated")
        return bytes(out)


def _entry_at(data: bytes, position: int) -> tuple[bytes, tuple[int, int], int]:
    """Return name, (offset of the local header, size) and the position of the next entry."""
    if position + _ENTRY.size > len(data):
        raise StateDecodingError("its directory is truncated")
    fields = _ENTRY.unpack_from(data, position)
    mark, flags, method, stored, size = fields[0], fields[3], fields[4], fields[8], fields[9]
    name_size, extra_size, comment_size, header = fields[10], fields[11], fields[12], fields[16]
    start = position + _ENTRY.size
    name, extra = data[start : start + name_size], data[start + name_size : start + name_size + extra_size]
    end = start + name_size + extra_size + comment_size
    if mark != _ENTRY_MARK or end > len(data):
        raise StateDecodingError("its directory is malformed")
    size, stored, header = _with_extra(extra, [size, stored, header])
    if method or flags & _ENCRYPTED or stored != size:
        raise StateDecodingError(f"record {name!r} is compressed or encrypted, which records of a checkpoint never are")
    return name, (header, size), end


def _with_extra(extra: bytes, values: list[int]) -> list[int]:
    """Replace sizes and offsets that do not fit 32 bits by their values in the zip64 extra field, in this order."""
    position = 0
    while position + 4 <= len(extra) and _IN_EXTRA in values:
        kind, size = struct.unpack_from("<HH", extra, position)
        field = extra[position + 4 : position + 4 + size]
        if kind == _EXTRA_64:
            numbers = iter(struct.unpack_from(f"<{len(field) // 8}Q", field))
            return [next(numbers, value) if value == _IN_EXTRA else value for value in values]
        position += 4 + size
    return values


def _root_of(entries: dict[bytes, tuple[int, int]]) -> bytes:
    roots = [name[: -len(b"data.pkl")] for name in entries if name.endswith(b"/data.pkl") and name.count(b"/") == 1]
    if len(roots) != 1:
        raise StateDecodingError("it is not an archive of torch.save: it has no data.pkl")
    return roots[0]


def _with_limits(entries: dict[bytes, tuple[int, int]], directory: int) -> dict[bytes, _Record]:
    """Return records with their end limit: the offset of the next local header, or of the directory."""
    ordered = sorted(entries.items(), key=lambda item: item[1][0])
    limits = [place[0] for _, place in ordered[1:]] + [directory]
    return {
        name: _Record(name, header, size, limit) for (name, (header, size)), limit in zip(ordered, limits, strict=True)
    }
