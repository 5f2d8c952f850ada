"""Memory of large records in a state file: new memory that is filled after unpickling, in one pass over the file.

`PlainUnpickler` takes storages from a `StorageSource`: `LaterStorages`, or a `MappedFile` for views of the file.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from forgather.ml.checkpoint.files.parallel_read import FilePart


class StorageSource(Protocol):
    """Supplier of memory for records of an archive."""

    def take(self, offset: int, size: int) -> torch.UntypedStorage | None:
        """Return the storage of the bytes at `offset` in the file, or None if the caller must read them."""

    def fill(self) -> None:
        """Make the content of all storages available."""


class LaterStorages:
    """New memory that is filled later: `parts` lists the byte ranges of the file that are still missing."""

    def __init__(self, read: Callable[[list[FilePart]], None]) -> None:
        self._read = read
        self.parts: list[FilePart] = []

    def take(self, offset: int, size: int) -> torch.UntypedStorage:
        content = torch.empty(size, dtype=torch.uint8, device="cpu")
        self.parts.append(FilePart(offset, memoryview(content.numpy())))  # type: ignore[arg-type]
        return content.untyped_storage()

    def fill(self) -> None:
        """Read the missing parts now."""
        self._read(self.parts)
        self.parts = []
