"""Loaders whose position can be saved at any batch and restored without reading through the data.

map-style dataset    the position in a global, seeded order (`data_order`): seed, epoch, index of the next sample
iterable dataset     the dataset's own state where it has one (`stream_batches`); without one, the number of batches
ready loader         its own state; without one, the number of batches, which a resume has to skip one by one
"""

import functools
import gc
import inspect
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeGuard

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from forgather.ml.trainer.loading.collation import collate_samples
from forgather.ml.trainer.loading.data_errors import ExplainingCollator
from forgather.ml.trainer.loading.data_order import (
    WHOLE,
    DataOrder,
    Part,
    PositionedBatches,
    SeededSamples,
    is_stateful,
    seeded_stream,
    stable_seed,
)
from forgather.ml.trainer.loading.data_types import CollateFn, MapDataset, StatefulBatches
from forgather.ml.trainer.loading.epoch_loader import ITERABLE_REMEDY, SinglePass, name_of
from forgather.ml.trainer.loading.map_style_loader import OrderedLoader, as_dataset
from forgather.ml.trainer.loading.stream_state import loses_samples, warn_of_lost_samples, warn_of_random_order
from forgather.ml.trainer.loading.wrapped_loaders import CountingLoader, StatefulLoader, StreamLoader
from forgather.ml.trainer.loop.signals import leave_signals_to_parent

_SPLITS = ("train", "test", "validation", "valid", "dev", "eval")


class EvalDataLoader(DataLoader[Any]):
    """A DataLoader that is true in a boolean context, however many batches it has."""

    def __bool__(self) -> bool:
        return True


class ResumableLoader(Protocol):
    """Batches of one epoch at a time, from a position that can be saved and restored."""

    @property
    def batch_size(self) -> int | None: ...

    @property
    def num_batches(self) -> int | None:
        """Batches of a whole epoch; None when unknown."""

    def set_epoch(self, epoch: int) -> None:
        """Starts an epoch at its beginning; in the epoch that is under way the position is kept."""

    def __iter__(self) -> Iterator[Any]:
        """The rest of the present epoch: nothing after its end, until `set_epoch` starts the next."""

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last batch that was handed out, whatever workers have prefetched."""

    def check_state_dict(self, state: object) -> None:
        """Raises for a position that `load_state_dict` could not use, and changes nothing."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def close(self) -> None:
        """Ends workers and iterators and keeps the position; iterating again starts new ones."""


def build_train_loader(
    dataset: object,
    *,
    batch_size: int,
    collate_fn: CollateFn | None = None,
    seed: int,
    shuffle: bool = True,
    drop_last: bool = False,
    num_workers: int = 0,
    pin_memory: bool = False,
    persistent_workers: bool = False,
    prefetch_factor: int | None = None,
    set_dataset_epoch: bool = True,
    part: Part = WHOLE,
) -> ResumableLoader:
    """A resumable loader for a map-style dataset, an iterable dataset or a ready loader.

    Of a map-style dataset it hands out the batches of one `part`; the other kinds are the caller's to split.

    Only map-style datasets are shuffled here: an iterable one has an order of its own, and a ready loader is used as it
    is, whatever the other arguments say.
    """
    if _is_loader(dataset):
        warn_of_random_order(getattr(dataset, "dataset", None))
        if is_stateful(dataset):
            warn_of_lost_samples(dataset)
        return adapted_loader(dataset, set_dataset_epoch, part)
    _check_batch_size(batch_size)
    options = _loader_options(collate_fn, num_workers, pin_memory, persistent_workers, prefetch_factor)
    if is_map_style(dataset):
        samples = SeededSamples(dataset, set_dataset_epoch)
        order = DataOrder(0, seed=seed, shuffle=shuffle)
        return OrderedLoader(samples, order, batch_size, drop_last, options, part)
    assert _is_stream(dataset), "there are three kinds"
    own_seed = seed if part.number == 0 else stable_seed(seed, part.number)
    warn_of_random_order(dataset)
    stream = seeded_stream(
        dataset,
        seed=own_seed,
        batch_size=batch_size,
        forward_epoch=set_dataset_epoch,
        in_workers=num_workers > 0,
        is_read_again=loses_samples(dataset),
    )
    return StreamLoader(stream, batch_size, drop_last, options, part)


def build_eval_loader(
    dataset: object,
    *,
    batch_size: int,
    collate_fn: CollateFn | None = None,
    drop_last: bool = False,
    num_workers: int = 0,
    pin_memory: bool = False,
    persistent_workers: bool = False,
    prefetch_factor: int | None = None,
    part: Part = WHOLE,
) -> Iterable[Any]:
    """The batches in the order of the dataset, the same at each pass; `len()` works when the number is known.

    Iterating leaves the global generators alone, so that an evaluation does not change the training. An empty dataset
    is accepted: it may be one rank's share. A ready loader is returned as it is, a generator as one that explains itself.
    """
    if _is_loader(dataset):
        return _ready_loader(dataset)
    _check_batch_size(batch_size)
    options = _loader_options(collate_fn, num_workers, pin_memory, persistent_workers, prefetch_factor)
    if is_map_style(dataset):
        order = DataOrder(len(dataset), seed=0, shuffle=False)
        batches = PositionedBatches(order, batch_size, drop_last, part=part, fills_up=False)
        return EvalDataLoader(as_dataset(SeededSamples(dataset, False)), batch_sampler=batches, **options)
    assert _is_stream(dataset), "there are three kinds"
    stream = seeded_stream(dataset, seed=0, batch_size=batch_size, forward_epoch=False, in_workers=num_workers > 0)
    return EvalDataLoader(stream, batch_size=batch_size, drop_last=drop_last, **options)


def is_resumable(loader: object) -> bool:
    """Whether a loader is one of ours, or behaves like one."""
    needed = ("num_batches", "set_epoch", "state_dict", "load_state_dict", "close")
    return all(hasattr(loader, name) for name in needed)


def adapted_loader(loader: Iterable[Any], set_dataset_epoch: bool, part: Part = WHOLE) -> ResumableLoader:
    """A loader with a position, around any iterable of batches; one with a state of its own keeps it."""
    if _keeps_state(loader):
        return StatefulLoader(loader, set_dataset_epoch, part)
    return CountingLoader(_ready_loader(loader), set_dataset_epoch, part)


def kind_of(dataset: object) -> str:
    """One of "iterable", "loader" and "map"."""
    # Hugging Face's iterable datasets need not be torch's
    if isinstance(dataset, IterableDataset) or any(
        base.__name__ == "IterableDataset" for base in type(dataset).__mro__
    ):
        return "iterable"
    if isinstance(dataset, DataLoader):
        return "loader"
    problem = _problem_with(dataset)
    if problem is not None:
        raise ValueError(problem)
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return "map"
    if hasattr(dataset, "__iter__") and not isinstance(dataset, Dataset):
        return "loader"
    raise ValueError(
        f"{name_of(dataset)} cannot be used as a dataset: it needs __len__ and __getitem__ (samples by number), __iter__ "
        "as a torch IterableDataset (a stream of samples), or __iter__ alone (a loader of ready batches)."
    )


def is_map_style(dataset: object) -> TypeGuard[MapDataset]:
    return kind_of(dataset) == "map"


def _is_stream(dataset: object) -> TypeGuard[Iterable[Any]]:
    return kind_of(dataset) == "iterable"


def _is_loader(dataset: object) -> TypeGuard[Iterable[Any]]:
    return kind_of(dataset) == "loader"


def _keeps_state(loader: Iterable[Any]) -> TypeGuard[StatefulBatches]:
    return is_stateful(loader)


def _ready_loader(loader: Iterable[Any]) -> Iterable[Any]:
    if isinstance(loader, Iterator) and type(loader).__module__ in ("builtins", "itertools"):
        return SinglePass(loader)
    return loader


def _problem_with(dataset: object) -> str | None:
    """Why an object that looks like a dataset or a loader is none, and what to give instead."""
    if isinstance(dataset, Mapping):
        return _problem_with_mapping(dataset)
    if isinstance(dataset, (str, bytes)):
        return (
            f"The text {dataset!r} is not a dataset. Load what it names first, such as with "
            f"datasets.load_dataset({dataset!r}, split='train'), and give the result."
        )
    if isinstance(dataset, type):
        return f"The class {dataset.__qualname__} is not a dataset: give an object of it, {dataset.__qualname__}(...)."
    if inspect.isroutine(dataset):
        name = dataset.__qualname__
        return f"The function {name} is not a dataset. Give what it returns; if that is a generator, give {ITERABLE_REMEDY}"
    return None


def _problem_with_mapping(dataset: Mapping[Any, Any]) -> str:
    keys, values = list(dataset)[:5], list(dataset.values())
    is_of_columns = all(isinstance(value, (torch.Tensor, np.ndarray, list, tuple)) for value in values)
    if values and is_of_columns and not set(_SPLITS) & set(keys):
        return (
            f"A {name_of(dataset)} of columns, {keys}, is not a dataset: samples are asked for by number. Make one of it "
            "with datasets.Dataset.from_dict(...), or give a list with one dict for each sample."
        )
    return (
        f"{name_of(dataset)} is a mapping with the keys {keys}, not a dataset: choose one of its entries, such as "
        'dataset["train"].'
    )


@functools.cache
def _leave_garbage_to_parent() -> None:
    """Let no forked process collect what it has inherited.

    A process group that has become garbage would be destroyed there together with threads that a fork does not copy, for
    which its destructor waits for ever.
    """
    os.register_at_fork(after_in_child=gc.freeze)


def _loader_options(
    collate_fn: CollateFn | None,
    num_workers: int,
    pin_memory: bool,
    persistent_workers: bool,
    prefetch_factor: int | None,
) -> dict[str, Any]:
    if num_workers > 0:
        _leave_garbage_to_parent()
    return {
        "collate_fn": ExplainingCollator(collate_fn or collate_samples, is_own=collate_fn is None),
        "num_workers": num_workers,
        # torch warns at every epoch when there is nothing to pin memory for
        "pin_memory": pin_memory and torch.accelerator.is_available(),
        "persistent_workers": persistent_workers and num_workers > 0,
        "prefetch_factor": prefetch_factor,
        "worker_init_fn": leave_signals_to_parent,
        # without one, each new iterator would draw from the global generator: a resumed run draws more often
        "generator": torch.Generator(),
    }


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} cannot be used: a batch has at least 1 sample.")
