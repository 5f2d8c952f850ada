"""EpochLoader: base class of resumable loaders, with one pass per epoch that every new iterator continues.

Invariant: the position is after the last batch handed out, also after an error. Its subclasses are in
`map_style_loader` and `wrapped_loaders`. This module also checks lengths and generators passed as datasets.
"""

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, Generic, TypeVar

from torch import Tensor
from torch.utils.data import DataLoader

from forgather.ml.trainer.loading.data_types import Batch

ITERABLE_REMEDY = "a torch.utils.data.IterableDataset with an __iter__ that returns a new generator each time."


LoaderT = TypeVar("LoaderT", bound=Iterable[Any])
"""Type of the loader that an `EpochLoader` wraps."""


class EpochLoader(Generic[LoaderT]):
    """Base class of loaders: all iterators of an epoch continue the same pass."""

    def __init__(self, loader: LoaderT) -> None:
        self._loader = loader
        self._iterator: Iterator[Any] | None = None
        self._epoch = 0
        self._finished = False

    @property
    def dataset(self) -> object:
        """Dataset that the caller passed; None for a loader without the attribute `dataset`."""
        return getattr(self._loader, "dataset", None)

    def __bool__(self) -> bool:
        return True

    def set_epoch(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        self._pause()
        self._start_epoch(epoch)
        self._epoch, self._finished = epoch, False

    def __iter__(self) -> Iterator[Any]:
        while not self._finished:
            if self._iterator is None:
                self._iterator = self._open()
            try:
                batch = next(self._iterator)
            except StopIteration:
                self._finish()
                return
            except BaseException:
                # Workers would continue after the failed batch, and the position would be wrong. New workers start at it.
                self.close()
                raise
            yield self._counted(batch)

    def close(self) -> None:
        # Before the iterator is gone: some loaders get their position from it.
        self._keep_position()
        self._end_workers()

    def _end_workers(self) -> None:
        # A loader that is its own iterator, such as a generator, belongs to the user.
        if self._iterator is not self._loader:
            shut_down(self._iterator)
        self._iterator = None
        if isinstance(self._loader, DataLoader):
            shut_down(self._loader._iterator)
            # A DataLoader with persistent workers would reuse this iterator, and wait forever for its stopped workers.
            self._loader._iterator = None

    def _pause(self) -> None:
        """Leave the pass in progress; persistent workers keep running."""
        if getattr(self._loader, "persistent_workers", False):
            self._iterator = None
        else:
            self._end_workers()

    def _finish(self) -> None:
        self._finished = True
        self._pause()

    def _open(self) -> Iterator[Any]:
        """Return an iterator from the position to the end of the epoch."""
        raise NotImplementedError

    def _start_epoch(self, epoch: int) -> None:
        """Move to the beginning of an epoch."""
        raise NotImplementedError

    def _counted(self, batch: Batch) -> Batch:
        """Advance the position past the batch, which is about to be handed out; return the batch."""
        return batch

    def _keep_position(self) -> None:
        """Save the position of the iterator, which is about to be closed."""


class SinglePass(Iterator[Any]):
    """Batches of a generator, which can be read once; raises ValueError if it is read again, or yields samples."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self._num_read = 0
        self._has_ended = False

    def __next__(self) -> object:
        if self._has_ended:
            raise ValueError(
                f"The {name_of(self._items)} that was passed as dataset ended after {self._num_read} batches, but another "
                "epoch or evaluation needs more. It can be read only once. Pass an object with an __iter__ that returns a "
                "new generator on every call."
            )
        try:
            item = next(self._items)
        except StopIteration:
            self._has_ended = True
            raise
        if self._num_read == 0 and _is_sample(item):
            raise ValueError(
                f"A {name_of(self._items)} was passed as dataset and yields single samples: its first item is a "
                f"{name_of(item)} with {_shapes(item)}. The items of a generator must be batches, since it can be read only "
                f"once: no shuffling, no second epoch. Pass a list of the samples, or {ITERABLE_REMEDY}"
            )
        self._num_read += 1
        return item


def _is_sample(item: object) -> bool:
    """Return whether a mapping looks like a single sample: its tensors have no batch dimension."""
    if not isinstance(item, Mapping):
        return False
    # `input_ids` of a sample have one dimension, for the tokens. Other columns of a sample may be scalars.
    values = [item["input_ids"]] if "input_ids" in item else list(item.values())
    least = 1 if "input_ids" in item else 0
    return all(not isinstance(value, Tensor) or value.ndim <= least for value in values)


def _shapes(item: Mapping[str, Any]) -> str:
    shown = [
        f"{name} of shape {list(value.shape)}" if isinstance(value, Tensor) else f"{name}, a {name_of(value)}"
        for name, value in item.items()
    ]
    return ", ".join(shown[:4])


def length_of(loader: object) -> int | None:
    """Return the length of a loader or dataset; None if it is unknown."""
    if not isinstance(loader, Sized):
        return None
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        # The __len__ of torch's DataLoader raises for streams.
        return None


def check_length(dataset: object, length: int | None, batch_size: int = 1, drop_last: bool = False) -> None:
    if length == 0:
        raise ValueError(
            f"The training dataset ({name_of(dataset)}) is empty. Check its path and split, and that no filter, limit or "
            "sharding removed all samples."
        )
    if drop_last and length is not None and length < batch_size:
        raise ValueError(
            f"The training dataset ({name_of(dataset)}) has {length} samples, fewer than one batch of {batch_size}, and "
            "dataloader_drop_last=True drops incomplete batches, so nothing is left. Use a smaller batch or more data, or set "
            "dataloader_drop_last=False."
        )


def name_of(item: object) -> str:
    return type(item).__qualname__


def shut_down(iterator: object) -> None:
    """Stop the workers of an iterator of torch or torchdata, or close a generator."""
    # A DataLoader does this when its iterator is garbage collected, which a traceback or a cycle can delay forever.
    end = getattr(iterator, "_shutdown_workers", None) or getattr(iterator, "close", None)
    if end is not None:
        end()
