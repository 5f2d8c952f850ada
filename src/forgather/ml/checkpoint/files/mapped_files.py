"""Mapped checkpoint files: tensors as views of a private mapping, and copies of them into existing tensors.

A mapped tensor describes bytes of a file and costs no memory. Components check it, then copy it into the tensors that
they already have. A copy on the CPU reads the file into its target, so that no page of the mapping becomes resident.
`state_files` maps files; optimizer state, EMA weights and `.bin` weights are copied.
"""

import mmap
import os
import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from forgather.ml.checkpoint.files.parallel_read import FilePart, read_parts
from forgather.ml.checkpoint.sharding.sharded_tensors import is_sharded, local_part, rows_of

# Kernels need aligned elements. `torch.save` aligns records, but the file may be from elsewhere.
_ALIGNMENT = 64
# Attribute of a mapped storage. Torch keeps the Python object of a storage for the life of the storage.
_ORIGIN = "_forgather_origin"


class MappedFile:
    """Private mapping of a file; processes of a node share its pages until they write to them."""

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self._mapping = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
        # The caller closes its descriptor before the tensors are copied.
        self.descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self.descriptor)

    def take(self, offset: int, size: int) -> torch.UntypedStorage | None:
        """Return a view of the mapping, or None if the offset is not aligned."""
        if offset % _ALIGNMENT:
            return None
        storage = torch.frombuffer(self._mapping, dtype=torch.uint8, count=size, offset=offset).untyped_storage()
        setattr(storage, _ORIGIN, _Origin(self, offset))
        return storage

    def fill(self) -> None:
        """Do nothing: the mapping has the content."""


class _Origin(NamedTuple):
    """File of a mapped storage, and the offset of the storage in the file."""

    file: MappedFile
    offset: int


def is_mapped(tensor: Tensor) -> bool:
    """Return whether the memory of a tensor belongs to a mapped checkpoint file."""
    return _origin_of(tensor) is not None


def _origin_of(tensor: Tensor) -> _Origin | None:
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return None
    origin: _Origin | None = getattr(tensor.untyped_storage(), _ORIGIN, None)
    return origin


class TensorCopies:
    """Copies of loaded tensors into existing tensors; `run` makes them, copies of mapped tensors in several threads."""

    def __init__(self) -> None:
        self._parts: dict[MappedFile, list[FilePart]] = {}
        self._others: list[tuple[Tensor, Tensor]] = []

    def add(self, target: Tensor, source: Tensor) -> None:
        """Note a copy of `source`, or of its rows for a sharded `target`; the targets must be disjoint."""
        if is_sharded(target):
            target, source = local_part(target), rows_of(source, target)
        origin = _origin_of(source)
        if origin is None or target.dtype != source.dtype or not (_is_plain(target) and _is_plain(source)):
            self._others.append((target, source))
        elif target.numel():
            out = memoryview(target.detach().reshape(-1).view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]
            offset = origin.offset + int(source.storage_offset()) * source.itemsize
            self._parts.setdefault(origin.file, []).append(FilePart(offset, out))

    @torch.no_grad()
    def run(self) -> None:
        """Make all noted copies."""
        for file, parts in self._parts.items():
            read_parts(file.path, file.descriptor, parts)
        for target, source in self._others:
            target.copy_(source)
        self._parts, self._others = {}, []


def _is_plain(tensor: Tensor) -> bool:
    """Return whether the memory of a tensor on the CPU is its content in order."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
