"""What goes into one file of a checkpoint, held until it is written.

Contents refer to live tensors; a save that goes on in the background gives them copies before it starts.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from forgather.ml.checkpoint.encoding.digest import iter_leaves
from forgather.ml.checkpoint.files import durable
from forgather.ml.checkpoint.files.hashed_io import HashingWriter
from forgather.ml.checkpoint.files.state_files import write_state
from forgather.ml.checkpoint.manifest import FileRecord
from forgather.ml.checkpoint.weights.module_weights import write_weights
from forgather.ml.checkpoint.weights.safetensors_io import SharingMetadataT


class Content(Protocol):
    """Something that can be streamed into a file."""

    @property
    def num_bytes(self) -> int: ...

    def write(self, writer: HashingWriter) -> dict[str, str]:
        """Stream it out; returns the names of single tensors, with checksums where the format lets them be read singly."""
        ...


@dataclass(frozen=True)
class StateContent:
    """A component's encoded state."""

    encoded: object

    @property
    def num_bytes(self) -> int:
        return _tensor_bytes(leaf for _, leaf in iter_leaves(self.encoded))

    def write(self, writer: HashingWriter) -> dict[str, str]:
        write_state(writer, self.encoded)
        return {}


@dataclass(frozen=True)
class WeightsContent:
    """Some tensors of the model."""

    tensors: Mapping[str, Tensor]
    sharing: SharingMetadataT

    @property
    def num_bytes(self) -> int:
        return _tensor_bytes(self.tensors.values())

    def write(self, writer: HashingWriter) -> dict[str, str]:
        return write_weights(writer, self.tensors, self.sharing)


@dataclass(frozen=True)
class RawContent:
    """Bytes as they are: configurations, metadata."""

    data: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.data)

    def write(self, writer: HashingWriter) -> dict[str, str]:
        writer.write(self.data)
        return {}


@dataclass(frozen=True)
class PlannedFile:
    """A file that this rank is going to write, and whose state it is."""

    path: str
    component: str
    content: Content
    owner: int | None = None
    owner_ranks: list[int] = field(default_factory=list)

    def write(self, directory: str, rank: int) -> FileRecord:
        """Write the file, durably, and say what was written."""
        path = os.path.join(directory, self.path)
        try:
            durable.make_parents_below(directory, self.path)
            with HashingWriter(path) as writer:
                tensors = self.content.write(writer)
        except OSError as error:
            if error.filename is not None:
                raise
            # Writes know only a number of the open file.
            raise OSError(error.errno, error.strerror or str(error), path) from error
        return FileRecord(
            path=self.path,
            size=writer.size,
            checksum=writer.checksum,
            writer_rank=rank,
            component=self.component,
            tensors=tensors,
            owner=self.owner,
            owner_ranks=self.owner_ranks,
        )


def _tensor_bytes(leaves: Iterable[object]) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, Tensor))
