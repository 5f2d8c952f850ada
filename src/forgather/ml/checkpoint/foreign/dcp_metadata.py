"""Reader of the `.metadata` file of torch.distributed.checkpoint (DCP) that does not unpickle it.

torch reads this file with `pickle.load`, which can run any code. Here it becomes neutral records first. A tensor is
returned only if its description is complete: dtype, shape, and chunks that tile it exactly. `dcp_weights` reads here.
"""

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from forgather.ml.checkpoint.errors import StateDecodingError
from forgather.ml.checkpoint.files.regular_files import read_small_file
from forgather.ml.checkpoint.foreign.pickled_records import PickledGlobal, PickledRecord, read_records
from forgather.ml.checkpoint.manifest import check_relative_path

METADATA_FILE = ".metadata"

_CLASSES = "torch.distributed.checkpoint.metadata."
_STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_MOST_DIMENSIONS = 64
_LARGEST = 2**62
# A lookup table, so that the name of a dtype in the file is never resolved as an attribute.
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StoredBytes:
    """Byte range of a `.distcp` file with one chunk, written by `torch.save`."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """Box of a tensor (offsets and sizes per axis), and the location of its values."""

    offsets: Shape
    sizes: Shape
    stored: StoredBytes


@dataclass(frozen=True)
class DcpTensor:
    """Tensor of the checkpoint; its chunks cover it exactly once."""

    dtype: torch.dtype
    shape: Shape
    chunks: tuple[Chunk, ...]


@dataclass
class DcpDirectory:
    """Content of `.metadata`; a tensor's description is checked when it is requested."""

    path: str
    entries: dict[str, PickledRecord]
    stored: dict[tuple[str, Shape], PickledRecord] = field(repr=False)

    @classmethod
    def open(cls, path: str) -> "DcpDirectory":
        file = os.path.join(path, METADATA_FILE)
        try:
            root = _state_of(read_records(read_small_file(file)), "Metadata")
            entries = _dict(root.get("state_dict_metadata"), "state_dict_metadata")
            stored = _dict(root.get("storage_data"), "storage_data")
            # Objects other than tensors (BytesStorageMetadata) are pickles, so they are never read.
            tensors = {name: one for name, one in entries.items() if _is(one, "TensorStorageMetadata")}
            return cls(path, tensors, dict(_by_place(stored.items())))
        except StateDecodingError as error:
            raise StateDecodingError(
                f"{file} was rejected: it describes something other than tensors, or could run code ({error})"
            ) from error

    def tensor(self, name: str) -> DcpTensor:
        """Return the description of a tensor; raise `StateDecodingError` if it is invalid."""
        try:
            return self._tensor(name)
        except StateDecodingError as error:
            file = os.path.join(self.path, METADATA_FILE)
            raise StateDecodingError(f"{file}: tensor {name[:200]!r} has an invalid description: {error}") from error

    def _tensor(self, name: str) -> DcpTensor:
        state = _state_of(self.entries[name], "TensorStorageMetadata")
        shape = _shape(state.get("size"))
        boxes = [_state_of(one, "ChunkStorageMetadata") for one in _list(state.get("chunks"), "chunks")]
        places = [(_shape(box.get("offsets")), _shape(box.get("sizes"))) for box in boxes]
        # A rank without rows of a sharded tensor may have written an empty chunk.
        filled = [(offsets, sizes) for offsets, sizes in places if math.prod(sizes)]
        _require_tiling(shape, filled)
        chunks = tuple(Chunk(offsets, sizes, self._bytes_of(name, offsets)) for offsets, sizes in filled)
        return DcpTensor(_dtype(state.get("properties")), shape, chunks)

    def _bytes_of(self, name: str, offsets: Shape) -> StoredBytes:
        record = self.stored.get((name, offsets))
        if record is None:
            raise StateDecodingError(f"no file has its chunk at {list(offsets)}")
        state = _state_of(record, _STORAGE_INFO)
        if state.get("transform_descriptors"):
            raise StateDecodingError("it is compressed; save the checkpoint again without stream extensions")
        # The file is untrusted: its path must not lead out of the directory.
        try:
            check_relative_path(state.get("relative_path"))
        except ValueError as error:
            raise StateDecodingError(f"its file has a path that {error}") from error
        return StoredBytes(state["relative_path"], _count(state.get("offset")), _count(state.get("length")))


def _by_place(items: Iterable[tuple[Any, Any]]) -> Iterable[tuple[tuple[str, Shape], PickledRecord]]:
    """Yield storage records by FQN and chunk offsets; skip objects other than tensors, which have no offsets."""
    for key, record in items:
        index = _state_of(key, "MetadataIndex")
        if index.get("offset") is not None:
            if type(index.get("fqn")) is not str or type(record) is not PickledRecord:
                raise StateDecodingError("storage_data has a malformed entry")
            yield (index["fqn"], _shape(index["offset"])), record


def _require_tiling(shape: Shape, boxes: Sequence[tuple[Shape, Shape]]) -> None:
    """Raise `StateDecodingError` unless the boxes form a grid over the tensor: no gaps, no overlaps."""
    if math.prod(shape) == 0:
        return
    # A missing element would keep its initial value without an error.
    if any(len(offsets) != len(shape) or len(sizes) != len(shape) for offsets, sizes in boxes):
        raise StateDecodingError("its chunks have a different number of dimensions")
    cells = 1
    for axis, length in enumerate(shape):
        # The spans of each axis must be consecutive. Then the number of boxes decides whether every cell is there.
        spans = sorted({(offsets[axis], offsets[axis] + sizes[axis]) for offsets, sizes in boxes})
        starts, ends = [start for start, _ in spans], [end for _, end in spans]
        if [*starts, length] != [0, *ends]:
            raise StateDecodingError(f"its chunks do not cover axis {axis} of shape {list(shape)} exactly once")
        cells *= len(spans)
    if cells != len(boxes) or len({offsets for offsets, _ in boxes}) != cells:
        raise StateDecodingError(f"its {len(boxes)} chunks do not cover shape {list(shape)} exactly once")


def _is(value: Any, class_name: str) -> bool:
    # `class_name` is short for a class of the metadata module, or a full name.
    return type(value) is PickledRecord and value.name in (class_name, _CLASSES + class_name)


def _state_of(value: Any, class_name: str) -> dict[str, Any]:
    if not _is(value, class_name):
        found = value.name if type(value) is PickledRecord else f"a {type(value).__name__}"
        raise StateDecodingError(f"it has {found[:200]} instead of {class_name}")
    return _dict(value.state, f"the state of {class_name}")


def _dict(value: Any, what: str) -> dict[Any, Any]:
    if type(value) is not dict:
        raise StateDecodingError(f"{what} is a {type(value).__name__}, not a dict")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if type(value) is not list:
        raise StateDecodingError(f"{what} is a {type(value).__name__}, not a list")
    return value


def _shape(value: Any) -> Shape:
    """Return the lengths of a pickled `torch.Size`."""
    if type(value) is PickledRecord and value.name == "torch.Size" and len(value.arguments) == 1:
        (value,) = value.arguments
    if type(value) is PickledRecord or type(value) is not tuple or len(value) > _MOST_DIMENSIONS:
        raise StateDecodingError("a shape is malformed")
    return tuple(_count(length) for length in value)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise StateDecodingError("a length or position is not a non-negative integer")
    return value


def _dtype(properties: Any) -> torch.dtype:
    # `TensorProperties.__getstate__` returns a tuple that starts with the dtype.
    if _is(properties, "TensorProperties") and type(properties.state) is tuple and properties.state:
        first = properties.state[0]
        if type(first) is PickledGlobal and first.name in _DTYPES:
            return _DTYPES[first.name]
    raise StateDecodingError("its dtype is unknown")
