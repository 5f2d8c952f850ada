"""State files (`.pt`): written in the format of `torch.save`, read by a restricted unpickler that never runs code.

A file is read once: the pass that fills the tensors also computes the checksum. `reader` loads components here,
`weights` reads `.bin` files, and `verification` checks files without a job.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from forgather.ml.checkpoint.encoding.archive_writer import Chunks, StateArchive
from forgather.ml.checkpoint.encoding.codec import decode_state
from forgather.ml.checkpoint.encoding.plain_pickle import PlainUnpickler
from forgather.ml.checkpoint.encoding.state_budget import MemoryBudget
from forgather.ml.checkpoint.encoding.storage_sources import LaterStorages
from forgather.ml.checkpoint.encoding.torch_archive import TorchArchive
from forgather.ml.checkpoint.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointLoadError,
    StateDecodingError,
    naming,
)
from forgather.ml.checkpoint.files.hashed_io import HashingWriter, read_exactly
from forgather.ml.checkpoint.files.mapped_files import MappedFile
from forgather.ml.checkpoint.files.parallel_read import read_and_hash, read_parts
from forgather.ml.checkpoint.files.regular_files import open_regular, path_inside
from forgather.ml.checkpoint.manifest import FileRecord
from forgather.ml.checkpoint.sharding.sharded_tensors import is_sharded
from forgather.ml.checkpoint.weights.safetensors_io import check_checksum, check_size


def write_state(writer: HashingWriter, encoded: object, chunks_of: Callable[[Any], Chunks] | None = None) -> None:
    """Write an encoded state in the format of `torch.save`; `chunks_of` supplies the content of sharded tensors."""
    StateArchive(encoded, is_sharded).write(writer, chunks_of)


def read_state(path: str, record: FileRecord | None = None, *, follow: bool = False, mapped: bool = False) -> Any:
    """Read a state file in one pass into new memory; with a record, verify its checksum before decoding.

    With `mapped`, large tensors are views of a private mapping of the file. All processes of a node then share one copy
    in the page cache. Copy such tensors to a device, and keep none of them.
    """
    encoded, budget = _read_encoded(path, record, follow, mapped=mapped)
    try:
        # Emptying the encoded containers keeps the peak memory near one copy of the state.
        return decode_state(encoded, budget, consume=True)
    except CheckpointError as error:
        raise type(error)(f"{path} was rejected: {error}") from error


def read_weight_names(path: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a weight file (`.bin`) on the meta device, without reading their content."""
    encoded, _ = _read_encoded(path, None, follow=True, with_data=False)
    return checked_weights(path, encoded)


def checked_weights(path: str, state: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a weight file by name; raise `CheckpointLoadError` if it has any other content."""
    names_fit = isinstance(state, dict) and all(type(name) is str for name in state)
    if not names_fit or not all(isinstance(tensor, torch.Tensor) for tensor in state.values()):
        raise CheckpointLoadError(f"{path} is not a weight file: it must contain only tensors by name.")
    weights: dict[str, torch.Tensor] = state
    for name, tensor in weights.items():
        if tensor.layout is torch.strided and tensor.nbytes > tensor.untyped_storage().nbytes():
            # Copying an expanded tensor could take any amount of memory.
            raise CheckpointLoadError(f"{path}: tensor {name[:100]!r} repeats its memory, which weights never do.")
    return weights


def _read_encoded(
    path: str, record: FileRecord | None, follow: bool, with_data: bool = True, mapped: bool = False
) -> tuple[Any, MemoryBudget]:
    check_size(path, record)
    with open(open_regular(path, follow=follow), "rb", buffering=0) as file:
        source = _FileSource(path, file.fileno())
        budget = MemoryBudget(source.size)
        storages = _storages(path, file.fileno(), mapped)
        refusal: StateDecodingError | None = None
        encoded = None
        try:
            encoded = PlainUnpickler(TorchArchive(source, budget), budget, with_data, storages).load()
        except StateDecodingError as error:
            refusal = error
        parts = storages.parts if isinstance(storages, LaterStorages) else []
        if record is not None:
            # Report damage first: a flipped bit in a good file can look like a malicious pickle. A mapped file is read
            # again, so this pass leaves it in the page cache.
            found = read_and_hash(path, file.fileno(), parts if refusal is None else [], direct=not mapped)
            check_checksum(path, "the file", record.checksum, found)
        elif refusal is None:
            storages.fill()
    if refusal is not None:
        raise type(refusal)(
            f"{path} was rejected: it is not a state file, or it could run code or exhaust memory ({refusal})"
        ) from refusal
    return encoded, budget


def _storages(path: str, descriptor: int, mapped: bool) -> MappedFile | LaterStorages:
    # An empty file cannot be mapped. The archive reader rejects it.
    if mapped and os.fstat(descriptor).st_size:
        return MappedFile(path, descriptor)
    return LaterStorages(functools.partial(read_parts, path, descriptor))


class _FileSource:
    """Bytes of a file at any position, for the archive reader."""

    def __init__(self, path: str, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self.size = os.fstat(descriptor).st_size
        self._position = 0

    def seek(self, offset: int, /) -> int:
        if offset < 0:
            # A damaged file can lead its reader here, so this is not an OSError of the disk.
            raise ValueError(f"negative position {offset}")
        self._position = offset
        return offset

    def readinto(self, buffer: memoryview, /) -> int:
        out = buffer[: max(0, min(len(buffer), self.size - self._position))]
        try:
            read_exactly(self._descriptor, out, self._position)
        except EOFError as error:
            raise CheckpointCorruptError(f"{self._path} is damaged: {error}") from error
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._path) from error
        self._position += len(out)
        return len(out)


def read_state_outline(path: str, record: FileRecord | None = None) -> Any:
    """Read a state file without the content of its tensors, which are on the meta device; checksums are not verified."""
    check_size(path, record)
    encoded, budget = _read_encoded(path, None, follow=record is None, with_data=False)
    with naming(path):
        return decode_state(encoded, budget, consume=True)


def file_checksum(path: str, note_bytes: Callable[[int], None] | None = None) -> str:
    """Return the checksum of a file; `note_bytes` gets the number of bytes of each part that was read."""
    with open(open_regular(path), "rb", buffering=0) as file:
        return read_and_hash(path, file.fileno(), note_bytes=note_bytes)


def verify_file(directory: str, record: FileRecord, note_bytes: Callable[[int], None] | None = None) -> None:
    """Raise `CheckpointCorruptError` unless the file has the size and checksum of its record."""
    path = path_inside(directory, record.path)
    check_size(path, record)
    check_checksum(path, "the file", record.checksum, file_checksum(path, note_bytes))
