"""Planned checkpoint files: path, component and content, collected before anything is written.

Contents refer to the live tensors without a copy, so the tensors must not change until the file is written. For a
background save, `background/staged_snapshot` puts copies in their place. `snapshot` and `weights/plan` make the plans.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from forgather.ml.checkpoint.encoding.archive_writer import StateArchive
from forgather.ml.checkpoint.encoding.digest import iter_leaves
from forgather.ml.checkpoint.encoding.staging import on_host
from forgather.ml.checkpoint.files import durable
from forgather.ml.checkpoint.files.hashed_io import HashingWriter
from forgather.ml.checkpoint.files.state_files import write_state
from forgather.ml.checkpoint.manifest import FileRecord
from forgather.ml.checkpoint.sharding.exchange import ShardExchange
from forgather.ml.checkpoint.sharding.sharded_tensors import is_sharded
from forgather.ml.checkpoint.weights.module_weights import write_weights
from forgather.ml.checkpoint.weights.safetensors_io import SharingMetadataT, names_in_file


class Content(Protocol):
    """Content that can be streamed into a file."""

    @property
    def num_bytes(self) -> int: ...

    def sharded_tensors(self) -> list[Any]:
        """Return the sharded tensors of the content, ordered as `write` reads them from the exchange."""
        ...

    def write(self, writer: HashingWriter, exchange: ShardExchange | None) -> dict[str, str]:
        """Write the content, and return tensor names with checksums.

        Only weight files return names. A checksum is empty if the format does not allow reading single tensors.
        """
        ...


@dataclass(frozen=True)
class StateContent:
    """Encoded state of a component."""

    encoded: object
    is_staged: bool = False
    """Whether the staging memory is limited, so that tensors of an accelerator are copied one by one."""

    @property
    def num_bytes(self) -> int:
        return _tensor_bytes(leaf for _, leaf in iter_leaves(self.encoded))

    def sharded_tensors(self) -> list[Any]:
        return StateArchive(self.encoded, is_sharded).late_tensors

    def write(self, writer: HashingWriter, exchange: ShardExchange | None) -> dict[str, str]:
        # The snapshot has already copied state that replicas compare. State on the host is passed through.
        state = self.encoded if self.is_staged else on_host(self.encoded)
        write_state(writer, state, None if exchange is None else exchange.chunks)
        return {}


@dataclass(frozen=True)
class WeightsContent:
    """Tensors of the model for one weight file (shard)."""

    tensors: Mapping[str, Tensor]
    sharing: SharingMetadataT

    @property
    def num_bytes(self) -> int:
        return _tensor_bytes(self.tensors.values())

    def sharded_tensors(self) -> list[Any]:
        return [self.tensors[name] for name in names_in_file(self.tensors) if is_sharded(self.tensors[name])]

    def write(self, writer: HashingWriter, exchange: ShardExchange | None) -> dict[str, str]:
        return write_weights(writer, self.tensors, self.sharing, None if exchange is None else exchange.chunks)


@dataclass(frozen=True)
class RawContent:
    """Bytes that are written unchanged: configuration, metadata."""

    data: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.data)

    def sharded_tensors(self) -> list[Any]:
        return []

    def write(self, writer: HashingWriter, exchange: ShardExchange | None) -> dict[str, str]:
        writer.write(self.data)
        return {}


@dataclass(frozen=True)
class PlannedFile:
    """File that this rank will write, with the component and the ranks that own its content."""

    path: str
    component: str
    content: Content
    owner: int | None = None
    owner_ranks: list[int] = field(default_factory=list)

    def write(
        self,
        directory: str,
        rank: int,
        exchange: ShardExchange | None = None,
        note_bytes: Callable[[memoryview], None] | None = None,
    ) -> FileRecord:
        """Write and fsync the file, and return its manifest record; `exchange` supplies sharded tensors.

        `note_bytes` gets each part of the content after the file has taken it over.
        """
        path = os.path.join(directory, self.path)
        try:
            durable.make_parents_below(directory, self.path)
            with HashingWriter(path, note_bytes) as writer:
                tensors = self.content.write(writer, exchange)
        except OSError as error:
            if error.filename is not None:
                raise
            # An error of a write has no path, because writes use the file descriptor.
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
