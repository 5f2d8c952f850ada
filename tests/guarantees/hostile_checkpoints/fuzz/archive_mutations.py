"""Archive mutations: state files with a rebuilt zip archive or a hand-written pickle."""

import collections
import functools
import io
import os
import pickle
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

import torch

from tests.guarantees.hostile_checkpoints.fuzz.place import Place
from tests.guarantees.hostile_checkpoints.fuzz.state_values import Call, colliding

_INFLATED_BYTES = 256 * 2**20
_ENTRY = b"PK\x01\x02"
_LOCAL = b"PK\x03\x04"
_END = b"PK\x05\x06"


def rebuild_archive(place: Place, way: str, number: int) -> bool:
    """Rebuild the zip archive in another way; its content counts as data."""
    place.write(ARCHIVES[way](place.read(), number))
    return True


def replace_pickle(place: Place, way: str, number: int) -> bool:
    """Replace the pickle in the archive."""
    place.write(with_records(place.read(), {"data.pkl": PICKLES[way](str(place.marker), number)}))
    return way not in _CALLS


def bare_pickle(place: Place, way: str, number: int) -> bool:
    """Write a pickle without an archive, or in torch's legacy format."""
    if number % 3 == 0:
        place.write(PICKLES[way](str(place.marker), number))
    elif number % 3 == 1:
        place.write(_legacy(torch.load(place.path, weights_only=True)))
    else:
        legacy = _legacy({"a": torch.ones(2)})
        place.write(legacy[: number % len(legacy)] + PICKLES[way](str(place.marker), number))
    return True


def _legacy(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


# --- archives


def records_of(archive: bytes) -> dict[str, bytes]:
    """Return the records by name, without a CRC check: Forgather writes archives without CRCs."""
    found = {}
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        for name in file.namelist():
            with file.open(name) as record:
                record._expected_crc = None  # type: ignore[attr-defined]
                found[name] = record.read()
    return found


def packed(records: list[tuple[str, bytes]], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w", compression) as file:
        # Duplicate names are intended.
        warnings.simplefilter("ignore")
        for name, content in records:
            file.writestr(name, content)
    return buffer.getvalue()


def with_records(archive: bytes, changes: dict[str, bytes]) -> bytes:
    """Return an archive with new content for some records; `changes` names them without their folder."""
    found = records_of(archive)
    folder = next(iter(found)).split("/")[0]
    return packed(list({**found, **{f"{folder}/{name}": content for name, content in changes.items()}}.items()))


def _without_record(archive: bytes, number: int) -> bytes:
    found = records_of(archive)
    left_out = sorted(found)[number % len(found)]
    return packed([(name, content) for name, content in found.items() if name != left_out])


def _twice(archive: bytes, number: int) -> bytes:
    found = records_of(archive)
    name = sorted(found)[number % len(found)]
    return packed([*found.items(), (name, bytes(number % 5000)), (name.upper(), b"")])


def _renamed(archive: bytes, number: int) -> bytes:
    found = list(records_of(archive).items())
    names = ("../data.pkl", "/etc/x", "archive/../data.pkl", "/", "a" * 65_000, "data.pkl", "data\\0")
    position = number % len(found)
    found[position] = (names[number % len(names)], found[position][1])
    return packed(found)


def _set_fields(archive: bytes, signature: bytes, offset: int, form: str, value: int, number: int) -> bytes:
    """Write `value` into one header with the signature, or into all of them if `number` is a multiple of 4."""
    changed = bytearray(archive)
    positions = []
    start = archive.find(signature)
    while start >= 0:
        positions.append(start)
        start = archive.find(signature, start + 4)
    for position in positions if number % 4 == 0 else positions[number % len(positions) :][:1]:
        struct.pack_into(form, changed, position + offset, value)
    return bytes(changed)


_SIZES = (0, 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1, 64, 100_000)


def _wrong_header(signature: bytes, offset: int, form: str = "<I") -> Callable[[bytes, int], bytes]:
    limit = 2**32 if form == "<I" else 2**16

    def change(archive: bytes, number: int) -> bytes:
        return _set_fields(archive, signature, offset, form, _SIZES[number % len(_SIZES)] % limit, number)

    return change


@functools.lru_cache
def _inflating(byte: bytes) -> bytes:
    """Return deflate data that inflates to 256 MiB of one byte."""
    squeeze = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = byte * 2**20
    return b"".join(squeeze.compress(block) for _ in range(_INFLATED_BYTES // 2**20)) + squeeze.flush()


def _deflated_bomb(archive: bytes, number: int) -> bytes:
    """Return an archive with one record that inflates to 256 MiB: a tensor, or the pickle itself."""
    found = records_of(archive)
    folder = next(iter(found)).split("/")[0]
    claimed = _INFLATED_BYTES // 4
    pickled = _pickled([_storage_tensor("0", claimed, (claimed,), (1,))])
    name, byte = (f"{folder}/data/0", b"\0") if number % 2 else (f"{folder}/data.pkl", b"]")
    records = {f"{folder}/version": b"3\n", f"{folder}/data.pkl": pickled, f"{folder}/byteorder": b"little"}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for other, content in records.items():
            if other != name:
                file.writestr(other, content)
        _append_deflated(file, buffer, name, byte)
    return buffer.getvalue()


def _append_deflated(file: zipfile.ZipFile, buffer: io.BytesIO, name: str, byte: bytes) -> None:
    """Append data that is compressed already, because `zipfile` would compress all of it each time."""
    data = _inflating(byte)
    entry = zipfile.ZipInfo(name)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.file_size, entry.compress_size, entry.CRC = _INFLATED_BYTES, len(data), 0
    entry.header_offset = buffer.tell()
    buffer.write(entry.FileHeader())
    buffer.write(data)
    file.start_dir = buffer.tell()
    file.filelist.append(entry)
    file.NameToInfo[name] = entry


def _two_directories(archive: bytes, number: int) -> bytes:
    """Return an archive with two central directories: readers that search differently see different files."""
    second = packed([("archive/data.pkl", pickle.dumps({"a": 1}, protocol=2)), ("archive/version", b"3\n")])
    return archive + second if number % 2 else second + archive


def _overlapping(archive: bytes, number: int) -> bytes:
    """Point all directory entries at the same record."""
    first = archive.find(_ENTRY)
    where = struct.unpack_from("<I", archive, first + 42)[0] if number % 2 else archive.rfind(_LOCAL)
    return _set_fields(archive, _ENTRY, 42, "<I", where, 0)


def _with_comment(archive: bytes, number: int) -> bytes:
    buffer = io.BytesIO(archive)
    with zipfile.ZipFile(buffer, "a") as file:
        file.comment = (_END + bytes(18)) * (1 + number % 100)
    return buffer.getvalue()


ARCHIVES: dict[str, Callable[[bytes, int], bytes]] = {
    "compressed": lambda archive, number: packed(list(records_of(archive).items()), zipfile.ZIP_DEFLATED),
    "bzip2": lambda archive, number: packed(list(records_of(archive).items()), zipfile.ZIP_BZIP2),
    "inflating": _deflated_bomb,
    "record missing": _without_record,
    "record twice": _twice,
    "record renamed": _renamed,
    "no records": lambda archive, number: packed([]),
    "two directories": _two_directories,
    "overlapping": _overlapping,
    "comment": _with_comment,
    "compressed size": _wrong_header(_ENTRY, 20),
    "size": _wrong_header(_ENTRY, 24),
    "local size": _wrong_header(_LOCAL, 22),
    "name length": _wrong_header(_ENTRY, 28, "<H"),
    "extra length": _wrong_header(_LOCAL, 28, "<H"),
    "method": _wrong_header(_ENTRY, 10, "<H"),
    "flags": _wrong_header(_ENTRY, 8, "<H"),
    "offset": _wrong_header(_ENTRY, 42),
    "number of entries": _wrong_header(_END, 10, "<H"),
    "directory size": _wrong_header(_END, 12),
    "directory offset": _wrong_header(_END, 16),
    "other byte order": lambda archive, number: with_records(archive, {"byteorder": [b"big", b"odd", b""][number % 3]}),
    "other version": lambda archive, number: with_records(
        archive, {"version": [b"99\n", b"", b"-1", b"x"][number % 4]}
    ),
    "shorter record": lambda archive, number: with_records(archive, {"data/0": bytes(number % 64)}),
    "longer record": lambda archive, number: with_records(archive, {"data/0": bytes(100_000)}),
    "alignment": lambda archive, number: with_records(archive, {".storage_alignment": [b"0", b"-1", b"x"][number % 3]}),
    "torchscript": lambda archive, number: with_records(archive, {"constants.pkl": b"\x80\x02).", "code/a.py": b"x"}),
}


# --- pickles


class _Storage:
    """Storage that is pickled as the given reference to an archive record."""

    def __init__(self, *reference: Any) -> None:
        self.reference = reference


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.reference if isinstance(value, _Storage) else None


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(value)
    return buffer.getvalue()


def _storage_tensor(key: Any, numel: Any, shape: Any, stride: Any, device: Any = "cpu", kind: Any = None) -> Call:
    storage = _Storage("storage", kind or torch.FloatStorage, key, device, numel)
    return Call(torch._utils._rebuild_tensor_v2, storage, 0, shape, stride, False, collections.OrderedDict())


def _odd_reference(marker: str, number: int) -> bytes:
    odd: tuple[Any, ...] = (
        *(
            ("storage", torch.FloatStorage, "0", "cpu", size)
            for size in (-1, 0, 1, 10**6, 2**62, 2**64, 10**30, "3", None)
        ),
        *(("storage", torch.FloatStorage, key, "cpu", 1) for key in ("99", "../version", "", 0, None, "0" * 100_000)),
        *(("storage", torch.FloatStorage, "0", device, 1) for device in ("cuda:99", "meta", "odd", None, 7)),
        *(("storage", kind, "0", "cpu", 1) for kind in (dict, "FloatStorage", torch.BoolStorage, None, torch.float32)),
        *((), ("storage",), ("other", 1), "0", 7, ("storage", torch.FloatStorage, "0", "cpu", 1, "view")),
    )
    reference = odd[number % len(odd)]
    storage = _Storage()
    storage.reference = reference
    return _pickled(Call(torch._utils._rebuild_tensor_v2, storage, 0, (1,), (1,), False, collections.OrderedDict()))


def _doubling(first: bytes, number: int) -> bytes:
    """Return nested tuples that hold the previous level twice: small in memory, exponential to walk."""
    depth = 20 + number % 60
    # BINPUT, BINGET, TUPLE2: memoise the top of the stack, push it again, and pair both.
    levels = b"".join(b"q" + bytes([level]) + b"h" + bytes([level]) + b"\x86" for level in range(depth))
    return b"\x80\x02" + first + levels + b"."


@functools.lru_cache
def _colliding_keys() -> bytes:
    """Pickle a dict with colliding keys, without building it: each insertion compares with all earlier keys."""
    items = b"".join(b"\x8a" + bytes([len(key)]) + key + b"N" for key in map(pickle.encode_long, colliding()))
    return b"\x80\x02}(" + items + b"u."


def _global(module: str, name: str, argument: str) -> bytes:
    return b"\x80\x02c" + f"{module}\n{name}\nX".encode() + _text(argument) + b"\x85R."


def _text(text: str) -> bytes:
    return struct.pack("<I", len(text.encode())) + text.encode()


def _odd_call(marker: str, number: int) -> bytes:
    """Pickle a call of a function that tensor files may use, with unexpected arguments."""
    utils = torch._utils
    calls = (
        Call(collections.OrderedDict, [(1, 2)] * 3, 5),
        Call(collections.OrderedDict, "abc"),
        Call(collections.Counter, "a" * 100_000),
        Call(torch.Size, (10**30,)),
        Call(torch.Size, ("a",)),
        Call(torch.device, "odd:thing"),
        Call(utils._rebuild_parameter, 1, 2, 3),
        Call(utils._rebuild_tensor, _Storage("storage", torch.FloatStorage, "0", "cpu", 1), 0, (2**40,), (0,)),
        Call(utils._rebuild_sparse_tensor, torch.sparse_coo, (1, 2, 3)),
        Call(utils._rebuild_sparse_tensor, torch.strided, ()),
        Call(utils._rebuild_meta_tensor_no_storage, torch.float32, (10**9, 10**9, 10**9), (1, 1, 1), False),
        Call(utils._rebuild_device_tensor_from_numpy, [1] * 10, torch.float32, "cpu", False),
        Call(utils._rebuild_nested_tensor, 1, 2, 3, 4),
        Call(utils._rebuild_qtensor, None, 0, (1,), (1,), (torch.per_tensor_affine, 1.0, 0), False, None),
        Call(utils._rebuild_parameter_with_state, torch.ones, True, {}, {"__class__": 1}),
        Call(set, "abc"),
        Call(bytearray, 10**9),
        Call(torch.Tensor, 10**9),
        Call(torch.FloatStorage, 10**9),
    )
    return _pickled(calls[number % len(calls)])


_CALLS = {"system", "eval", "odd call"}
PICKLES: dict[str, Callable[[str, int], bytes]] = {
    "system": lambda marker, number: _global(["os", "posix", "subprocess"][number % 3], "system", f"touch {marker}"),
    "eval": lambda marker, number: _global("builtins", ["eval", "exec"][number % 2], f"open({marker!r}, 'w')"),
    "bomb": lambda marker, number: pickle.dumps({"a": Call(os.system, f"touch {marker}")}, protocol=2 + number % 4),
    "attribute": lambda marker, number: _global("torch.serialization", ["os.system", "load"][number % 2], marker),
    "odd call": _odd_call,
    "odd reference": _odd_reference,
    "doubling": lambda marker, number: _doubling(b"]", number),
    "colliding keys": lambda marker, number: _colliding_keys(),
    "million lists": lambda marker, number: b"\x80\x02" + b"]" * 10**6 + b".",
    "million dicts": lambda marker, number: b"\x80\x02(" + b"}" * 10**6 + b"l.",
    "million marks": lambda marker, number: b"\x80\x02" + b"(" * 10**6 + b"]" + b".",
    "million memos": lambda marker, number: (
        b"\x80\x02]" + b"".join(b"r" + struct.pack("<I", n) for n in range(10**5)) + b"."
    ),
    "deep": lambda marker, number: b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b".",
    "deep tuples": lambda marker, number: b"\x80\x02)" + b"\x85" * (10 ** (2 + number % 5)) + b".",
    "far memo": lambda marker, number: b"\x80\x02]r" + b"\xff" * 4 + b"j" + struct.pack("<I", number % 2**32) + b".",
    "long text": lambda marker, number: b"\x80\x02X" + b"\xff" * 4 + b"a.",
    "long int": lambda marker, number: b"\x80\x02\x8b" + struct.pack("<i", [2**31 - 1, -1, 5][number % 3]) + b"abcde.",
    "255 bytes of int": lambda marker, number: b"\x80\x02\x8a\xff" + b"\x7f" * 255 + b".",
    "truncated": lambda marker, number: (whole := pickle.dumps([{"a": 1}] * 9, protocol=2))[: number % len(whole)],
    "empty": lambda marker, number: b"",
    "stop": lambda marker, number: b"\x80\x02.",
    "protocol": lambda marker, number: b"\x80" + bytes([number % 256]) + b"N.",
    "noise": lambda marker, number: b"\x80\x02" + number.to_bytes(16, "little").rstrip(b"\0") + b".",
}
