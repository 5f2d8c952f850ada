"""Data types: map-style dataset, collator, batch, and the state methods that a loader may have."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

Batch = Mapping[str, Any]
"""Tensors and other values by name; the names are arguments of the model."""
CollateFn = Callable[[list[Any]], Any]
"""Makes a batch of a list of samples."""


class MapDataset(Protocol):
    """A map-style dataset: samples by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


class HasState(Protocol):
    """A dataset, an iterator or a loader that can save its position and return to it."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> object: ...


class StatefulBatches(HasState, Protocol):
    """A loader of batches with state methods, such as torchdata's StatefulDataLoader."""

    def __iter__(self) -> Iterator[Any]: ...
