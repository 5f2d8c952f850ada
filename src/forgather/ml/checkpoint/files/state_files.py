"""State files (`.pt`): written in the format of `torch.save`, read by a restricted unpickler that never runs code.

A file is read once: the pass that fills the tensors also computes the checksum. `reader` loads components here,
`weights` reads `.bin` files, and `verification` checks files without a job.
"""

from collections.abc import Callable
from typing import Any

import torch

from forgather.ml.checkpoint.encoding.archive_writer import Chunks, StateArchive
from forgather.ml.checkpoint.encoding.codec import decode_state
from forgather.ml.checkpoint.encoding.plain_pickle import PlainUnpickler
from forgather.ml.checkpoint.encoding.state_budget import MemoryBudget
from forgather.ml.checkpoint.encoding.torch_archive import TorchArchive
from forgather.ml.checkpoint.errors import CheckpointError, CheckpointLoadError, StateDecodingError
from forgather.ml.checkpoint.files.hashed_io import HashingReader, HashingWriter
from forgather.ml.checkpoint.files.regular_files import path_inside
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
    with HashingReader(path, follow=follow, direct=not mapped) as reader:
        budget = MemoryBudget(reader.size)
        refusal: StateDecodingError | None = None
        encoded = None
        try:
            archive = TorchArchive(reader, budget)
            encoded = PlainUnpickler(archive, budget, with_data, reader.map() if mapped else None).load()
        except StateDecodingError as error:
            refusal = error
        if record is not None:
            # Report damage first: a flipped bit in a good file can look like a malicious pickle.
            check_checksum(path, "the file", record.checksum, reader.finish())
    if refusal is not None:
        raise type(refusal)(
            f"{path} was rejected: it is not a state file, or it could run code or exhaust memory ({refusal})"
        ) from refusal
    return encoded, budget


def file_checksum(path: str) -> str:
    """Return the checksum of a file."""
    with HashingReader(path) as reader:
        return reader.finish()


def verify_file(directory: str, record: FileRecord) -> None:
    """Raise `CheckpointCorruptError` unless the file has the size and checksum of its record."""
    path = path_inside(directory, record.path)
    check_size(path, record)
    check_checksum(path, "the file", record.checksum, file_checksum(path))
