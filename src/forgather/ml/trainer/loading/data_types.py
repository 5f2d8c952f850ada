"""Data types: protocols of map-style datasets and of loaders with state methods; aliases for batch and collator.

This module imports nothing from the package, so that all loaders can use it.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

Batch = Mapping[str, Any]
"""Tensors and other values by name; the names are arguments of the model."""
CollateFn = Callable[[list[Any]], Any]
"""Collator: turns a list of samples into a batch."""


class MapDataset(Protocol):
    """Map-style dataset: samples by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


class HasState(Protocol):
    """Dataset, iterator or loader that can save and restore its position."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> object: ...


class StatefulBatches(HasState, Protocol):
    """Loader of batches with state methods, such as torchdata's StatefulDataLoader."""

    def __iter__(self) -> Iterator[Any]: ...


class Move(NamedTuple):
    """Samples of one batch as positions `first` to `stop` of the order, and the position behind its round."""

    first: int
    stop: int
    position: int
    is_empty: bool
    """Whether the samples only provide the shapes of an `EmptyBatch`."""
