"""Safetensors files: streamed writing with checksums, and reading of tensors into existing memory.

A file's header is validated before any tensor is read: it may be damaged or malicious. Weights, quantised models and
imported checkpoints are read and written here.
"""

import functools
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forgather.ml.checkpoint.encoding import strict_json
from forgather.ml.checkpoint.encoding.staging import can_stage, iter_chunks, staged_chunks
from forgather.ml.checkpoint.errors import CheckpointCorruptError, CheckpointLoadError
from forgather.ml.checkpoint.files.hashed_io import (
    BUFFER_BYTES,
    Hasher,
    HashingReader,
    HashingWriter,
    new_hasher,
    read_exactly,
)
from forgather.ml.checkpoint.files.parallel_read import FilePart, read_and_hash, read_parts, run_in_threads
from forgather.ml.checkpoint.files.regular_files import open_regular
from forgather.ml.checkpoint.manifest import FileRecord
from forgather.ml.checkpoint.sharding.sharded_tensors import is_sharded, local_part, shards_of

# Key of the header checksum in a manifest record. Reading only some tensors verifies the header like a tensor.
HEADER_ENTRY = "__header__"
SHARING_KEY = "param_sharing"
"""Metadata key of a file or an index for the groups of tied names."""
SharingMetadataT = list[list[str]]
"""Groups of tied names; a tensor is stored under the first name of its group."""

# A forged header length must not allocate more than `_LARGEST_HEADER` bytes. Sizes in torch are signed 64-bit integers.
_LENGTH_BYTES = 8
_HEADER_ALIGNMENT = 64
_LARGEST_HEADER = 100 * 2**20
_LARGEST_SIZE = 2**63 - 1

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]


def byte_chunks(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the content of a tensor in logical order; a non-contiguous or device tensor is copied in chunks."""
    if tensor.numel() == 0:
        return
    if _is_in_one_piece(tensor):
        yield tensor_bytes(tensor)
        return
    for piece in iter_chunks(tensor.detach()):
        yield tensor_bytes(piece.cpu().resolve_conj().resolve_neg().contiguous())


def _is_in_one_piece(tensor: Tensor) -> bool:
    """Return whether the memory of a tensor is its content in order: contiguous, on the CPU, no lazy conjugation."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def names_in_file(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors in the order of a weight file."""
    # The format forbids gaps. Sorting by element size, largest first, keeps every tensor aligned without padding.
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


def write_safetensors(
    writer: HashingWriter,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    chunks_of: Callable[[Any], Iterator[memoryview]] | None = None,
) -> dict[str, str]:
    """Write a safetensors file as a stream; return the checksum of each tensor and of the header.

    `chunks_of` supplies the content of sharded tensors, which this rank does not hold.
    """
    names = names_in_file(tensors)
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for name in names:
        tensor = tensors[name]
        _refuse_without_memory(name, tensor)
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _dtype_name(name, tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    # The padding aligns the first tensor. The format allows spaces at the end of the header.
    text += b" " * (-(len(text) + _LENGTH_BYTES) % _HEADER_ALIGNMENT)
    digests = {HEADER_ENTRY: _write_hashed(writer, [len(text).to_bytes(_LENGTH_BYTES, "little") + text])}
    for name, chunks in zip(names, _contents([tensors[name] for name in names], chunks_of), strict=True):
        digests[name] = _write_hashed(writer, chunks)
    return digests


def _contents(
    tensors: list[Tensor], chunks_of: Callable[[Any], Iterator[memoryview]] | None
) -> Iterator[Iterator[memoryview]]:
    """Yield the content of each tensor in chunks. The chunks of one tensor must be read before the next tensor."""
    staged = itertools.groupby(staged_chunks(filter(can_stage, tensors)), key=lambda item: item[0])
    for tensor in tensors:
        if chunks_of is not None and is_sharded(tensor):
            yield chunks_of(tensor)
        elif can_stage(tensor):
            _, chunks = next(staged)
            yield (tensor_bytes(chunk) for _, chunk in chunks)
        else:
            yield byte_chunks(tensor)


def _refuse_without_memory(name: str, tensor: Tensor) -> None:
    """Raise `ValueError` for tensors that the format cannot store: meta, sparse and nested tensors."""
    if tensor.is_meta:
        raise ValueError(f"Tensor {name!r} is on the meta device and has no values to save.")
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "a nested tensor" if tensor.is_nested else f"sparse ({tensor.layout})"
        raise ValueError(
            f"Tensor {name!r} is {kind}, which the safetensors format cannot store. Make it dense, or set "
            "save_safetensors=False to write pytorch_model.bin files."
        )


def _dtype_name(name: str, dtype: torch.dtype) -> str:
    if dtype not in _DTYPE_NAMES:
        raise ValueError(
            f"Tensor {name!r} has dtype {dtype}, which the safetensors format cannot store. "
            "Set save_safetensors=False to write pytorch_model.bin files."
        )
    return _DTYPE_NAMES[dtype]


def _write_hashed(writer: HashingWriter, chunks: Iterable[memoryview | bytes]) -> str:
    hasher = new_hasher()
    for chunk in chunks:
        writer.write(chunk, also=hasher)
    return hasher.hexdigest()


@dataclass(frozen=True)
class TensorEntry:
    """Header entry of a tensor in a safetensors file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class SafetensorsHeader:
    """Parsed header of a safetensors file; offsets count from the beginning of the file."""

    tensors: dict[str, TensorEntry]
    sharing: SharingMetadataT


def read_header(path: str, record: FileRecord | None = None) -> SafetensorsHeader:
    """Return the header of a safetensors file, checked against the file size and the checksum of `record`."""
    check_size(path, record)
    # Symlinks are followed only outside checkpoints, for example in the Hugging Face cache.
    with open(open_regular(path, follow=record is None), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = file.read(_LENGTH_BYTES)
        num_bytes = int.from_bytes(length, "little")
        if len(length) < _LENGTH_BYTES or num_bytes > min(size - _LENGTH_BYTES, _LARGEST_HEADER):
            raise CheckpointCorruptError(f"{path} is damaged: it is not a safetensors file, or is truncated")
        text = file.read(num_bytes)
    base = _LENGTH_BYTES + num_bytes
    if record is not None:
        # Verified before the header is parsed: a flipped bit in a name would look like a model that does not fit.
        hasher = new_hasher()
        hasher.update(memoryview(length + text))
        check_checksum(path, "its header", record.tensors.get(HEADER_ENTRY, "none"), hasher.hexdigest())
    try:
        header = expect_type(strict_json.loads(text, path, size), dict, "the header")
        metadata = expect_type(header.pop("__metadata__", {}), dict, "__metadata__")
        sharing_text = expect_type(metadata.get(SHARING_KEY, "[]"), str, SHARING_KEY)
        sharing = checked_sharing(strict_json.loads(sharing_text.encode(), path, size))
        tensors = {name: _entry(name, info, base, size) for name, info in header.items()}
        _require_full_cover(tensors, base, size)
    except (ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointCorruptError(f"{path} is damaged: its header cannot be read ({reason})") from error
    return SafetensorsHeader(tensors, sharing)


def _require_full_cover(tensors: Mapping[str, TensorEntry], base: int, size: int) -> None:
    """Raise `ValueError` unless the tensors cover the file without gaps or overlaps, as the format requires."""
    # Overlapping tensors could make a small file fill any amount of memory. A gap indicates a header of the wrong
    # length.
    end = base
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != end:
            raise ValueError(f"tensor {name!r} {'overlaps another' if entry.start < end else 'comes after a gap'}")
        end = entry.end
    if end != size:
        raise ValueError(f"{size - end} bytes after the last tensor belong to no tensor")


def _entry(name: str, info: Any, base: int, size: int) -> TensorEntry:
    dtype, shape = _DTYPES[info["dtype"]], [_count(number) for number in info["shape"]]
    start, end = (base + _count(number) for number in info["data_offsets"])
    # A dimension of 0 makes the product 0. `max(1, ...)` keeps it from hiding other dimensions that are too large.
    if math.prod(max(1, length) for length in shape) * dtype.itemsize > _LARGEST_SIZE:
        raise ValueError(f"tensor {name!r} has the impossible shape {shape}")
    if not base <= start <= end <= size or end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"tensor {name!r} is outside the file, or its size does not match its shape")
    return TensorEntry(dtype, tuple(shape), start, end)


def _count(number: object) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is not a valid length or offset")
    return number


def expect_type(value: object, kind: type, what: str) -> Any:
    """Return `value`, or raise `ValueError` if it is not of type `kind`."""
    if not isinstance(value, kind):
        raise ValueError(f"{what} should be a {kind.__name__}, but is a {type(value).__name__}")
    return value


def checked_sharing(groups: Any) -> SharingMetadataT:
    """Return groups of tied names from a file, or raise `ValueError` if they have another type."""
    for group in expect_type(groups, list, SHARING_KEY):
        for name in expect_type(group, list, f"a group of {SHARING_KEY}"):
            expect_type(name, str, f"a name of {SHARING_KEY}")
    sharing: SharingMetadataT = groups
    return sharing


def load_safetensors(path: str, targets: Mapping[str, Tensor], record: FileRecord | None = None) -> None:
    """Read the named tensors of a file into `targets`, in place.

    With a record, the data is verified: by the checksum of the file if all tensors are read, else by the checksums of
    the header and of each tensor.
    """
    header = read_header(path, record)
    # Reading a full file needs one checksum. The manifest also has a checksum per tensor for partial reads (stages).
    load = _load_whole if targets.keys() >= header.tensors.keys() else _load_some
    try:
        load(path, header, targets, record)
    except EOFError as error:
        raise CheckpointCorruptError(f"{path} is damaged: {error}") from error


def check_size(path: str, record: FileRecord | None) -> None:
    """Raise `CheckpointCorruptError` if the file is missing or its size differs from the record."""
    if record is None:
        return
    try:
        size = os.stat(path).st_size
    except FileNotFoundError:
        raise CheckpointCorruptError(
            f"{path} is missing (expected {record.size} bytes, component {record.component!r})"
        ) from None
    if size != record.size:
        raise CheckpointCorruptError(
            f"{path} is damaged: expected {record.size} bytes, found {size} (component {record.component!r})"
        )


def check_checksum(path: str, what: str, expected: str, found: str) -> None:
    """Raise `CheckpointCorruptError` if the checksum of the data read differs from the recorded checksum."""
    if found != expected:
        raise CheckpointCorruptError(f"{path} is damaged: {what} has checksum {found}, expected {expected}")


def load_rows(path: str, targets: Mapping[str, Any], record: FileRecord | None = None) -> None:
    """Read the rows of this rank into sharded tensors, in place; other rows are not read.

    The checksums in the manifest cover full tensors, so the caller verifies the file itself before.
    """
    header = read_header(path, record)

    def load(descriptor: int, name: str) -> None:
        entry, target = header.tensors[name], targets[name]
        shards = shards_of(target, f"{path}: tensor {name!r}")
        check_fit(path, name, entry.shape, entry.dtype, target)
        start = entry.start + shards.start * entry.dtype.itemsize
        local = local_part(target)
        rows = TensorEntry(entry.dtype, tuple(local.shape), start, start + shards.length * entry.dtype.itemsize)
        _fill(path, name, rows, local, lambda out: _read_from(descriptor, out, rows.start))

    _load_each(path, targets, record, load)


def _read_from(descriptor: int, out: memoryview, start: int, hasher: Hasher | None = None) -> None:
    """Fill `out` from the offset `start` of a file, in chunks that are hashed while they are in the processor cache."""
    for position in range(0, len(out), BUFFER_BYTES):
        chunk = out[position : position + BUFFER_BYTES]
        read_exactly(descriptor, chunk, start + position)
        if hasher is not None:
            hasher.update(chunk)


def _load_each(path: str, names: Iterable[str], record: FileRecord | None, load: Callable[[int, str], None]) -> None:
    """Call `load` with an open descriptor for each name, in several threads."""
    descriptor = open_regular(path, follow=record is None)
    try:
        run_in_threads([functools.partial(load, descriptor, name) for name in names])
    except EOFError as error:
        raise CheckpointCorruptError(f"{path} is damaged: {error}") from error
    finally:
        os.close(descriptor)


def _load_whole(path: str, header: SafetensorsHeader, targets: Mapping[str, Tensor], record: FileRecord | None) -> None:
    wanted = {name: targets[name] for name in header.tensors}
    for name, entry in header.tensors.items():
        check_fit(path, name, entry.shape, entry.dtype, wanted[name])
    # Threads must not write to the same memory.
    addresses = [target.data_ptr() for target in wanted.values() if target.numel()]
    are_separate = len(set(addresses)) == len(addresses)
    if are_separate and all(_is_direct(entry, wanted[name]) for name, entry in header.tensors.items()):
        _load_in_parallel(path, header, wanted, record)
    else:
        _load_in_order(path, header, wanted, record)


def _load_in_parallel(
    path: str, header: SafetensorsHeader, targets: Mapping[str, Tensor], record: FileRecord | None
) -> None:
    filled = {name: entry for name, entry in header.tensors.items() if entry.end > entry.start}
    parts = [FilePart(entry.start, tensor_bytes(targets[name])) for name, entry in filled.items()]
    with open(open_regular(path, follow=record is None), "rb", buffering=0) as file:
        if record is None:
            read_parts(path, file.fileno(), parts)
        else:
            check_checksum(path, "the file", record.checksum, read_and_hash(path, file.fileno(), parts))


def _load_in_order(
    path: str, header: SafetensorsHeader, targets: Mapping[str, Tensor], record: FileRecord | None
) -> None:
    """Load tensors one by one, for targets that need a staging buffer."""
    with HashingReader(path, follow=record is None) as reader:

        def read(out: memoryview) -> None:
            if reader.readinto(out) != len(out):
                raise CheckpointCorruptError(f"{path} is damaged: it is truncated")

        # In file order, so that the same pass over the bytes fills the tensors and computes the checksum.
        for name, entry in sorted(header.tensors.items(), key=lambda item: item[1].start):
            reader.seek(entry.start)
            _fill(path, name, entry, targets[name], read)
        if record is not None:
            check_checksum(path, "the file", record.checksum, reader.finish())


def _load_some(path: str, header: SafetensorsHeader, targets: Mapping[str, Tensor], record: FileRecord | None) -> None:
    def load(descriptor: int, name: str) -> None:
        entry, hasher = header.tensors[name], new_hasher()
        _fill(path, name, entry, targets[name], lambda out: _read_from(descriptor, out, entry.start, hasher))
        if record is not None:
            check_checksum(path, f"tensor {name!r}", record.tensors.get(name, "none"), hasher.hexdigest())

    _load_each(path, targets, record, load)


def _is_direct(entry: TensorEntry, target: Tensor) -> bool:
    """Return whether the content of a file can be read straight into the memory of a tensor."""
    return target.dtype == entry.dtype and _is_in_one_piece(target)


def _fill(path: str, name: str, entry: TensorEntry, target: Tensor, read: Callable[[memoryview], None]) -> None:
    check_fit(path, name, entry.shape, entry.dtype, target)
    if target.numel() == 0:
        return
    target = target.detach()
    # Reading directly into the target avoids a second copy of the weights in memory.
    if _is_direct(entry, target):
        read(tensor_bytes(target))
        return
    # Other devices, dtypes and layouts need a staging buffer. Pinned memory makes the copy to a GPU faster.
    staged = torch.empty(entry.shape, dtype=entry.dtype, pin_memory=target.device.type == "cuda")
    read(tensor_bytes(staged))
    target.copy_(staged)


def check_fit(path: str, name: str, shape: tuple[int, ...], dtype: torch.dtype, target: Tensor) -> None:
    """Raise `CheckpointLoadError` if the shape or the kind of dtype of a stored tensor differs from the target."""
    if _kind_of(dtype) != _kind_of(target.dtype):
        raise CheckpointLoadError.misfit(
            f"{path}: tensor {name!r} has dtype {dtype} in the checkpoint, but {target.dtype} in the model, and these "
            "cannot be converted. Build the model that was trained, or choose another checkpoint."
        )
    if tuple(target.shape) != tuple(shape):
        raise CheckpointLoadError.misfit(
            f"{path}: tensor {name!r} has shape {tuple(shape)} in the checkpoint, but {tuple(target.shape)} in the "
            "model. Build the model from the configuration of the checkpoint."
        )


def _kind_of(dtype: torch.dtype) -> str:
    """Return the kind of a dtype; loading converts between dtypes of the same kind only."""
    # Converting between floats of different widths is harmless. A float as an integer or a bool would be a wrong model.
    if dtype.is_floating_point:
        return "float"
    if dtype.is_complex:
        return "complex"
    return "bool" if dtype is torch.bool else "integer"
