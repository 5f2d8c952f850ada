"""Builders of data loaders: a resumable training loader, or an evaluation loader, for any kind of dataset.

The position of a training loader can be saved after any batch. The trainer calls `build_train_loader` and
`build_eval_loader`, in `ranks.team` once per rank.
"""

import functools
import gc
import inspect
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeGuard, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from forgather.ml.trainer.elastic.step_shares import StepShares
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
from forgather.ml.trainer.samples.length_groups import GroupedOrder, SampleLengths
from forgather.ml.trainer.samples.skipped import SkippedData

# Position of a training loader by kind of dataset:
#
#     map-style dataset    Position in a global, seeded order (`data_order`): seed, epoch, index of the next sample.
#     iterable dataset     State of the dataset if it has one (`stream_batches`), otherwise the number of batches.
#     DataLoader           Its own state, otherwise the number of batches, which a resumed run has to read again.

_SPLITS = ("train", "test", "validation", "valid", "dev", "eval")


class EvalDataLoader(DataLoader[Any]):
    """DataLoader that is true in a boolean context, also with zero batches."""

    def __bool__(self) -> bool:
        return True


class ResumableLoader(Protocol):
    """Loader of one epoch at a time, with a position that can be saved and restored."""

    @property
    def batch_size(self) -> int | None: ...

    @property
    def num_batches(self) -> int | None:
        """Number of batches of a full epoch; None if unknown."""

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch at its beginning; keep the position if this epoch is already in progress."""

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rest of the current epoch; after its end over nothing, until `set_epoch` starts the next."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was handed out, regardless of prefetched batches."""

    def check_state_dict(self, state: object) -> None:
        """Raise an error for a position that `load_state_dict` cannot use; change nothing."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def close(self) -> None:
        """Stop workers and iterators, and keep the position; iterating again starts new workers."""


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
    shares: StepShares | None = None,
    lengths: SampleLengths | None = None,
    skipped: SkippedData | None = None,
) -> ResumableLoader:
    """Build a resumable loader for a map-style dataset, an iterable dataset or an existing loader.

    A map-style dataset is sharded: the loader yields the batches of one `part`, or micro-batches of steps with `shares`.
    The caller must shard the other kinds.

    Only map-style datasets are shuffled here, with `lengths` in groups of similar length. An iterable dataset defines its
    own order. An existing loader is used unchanged, and the other arguments have no effect on it. Only samples of map-style
    datasets have an index, by which they can be `skipped`.
    """
    if skipped is not None and skipped.samples and not is_map_style(dataset):
        raise ValueError(
            f"skip_samples needs a map-style dataset, with __len__ and __getitem__, but the training data are "
            f"{name_of(dataset)}: a sample of a stream or a loader has no index. Filter it before, or use skip_steps."
        )
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
        if lengths is not None:
            order = GroupedOrder(0, seed=seed, lengths=lengths)
        return OrderedLoader(samples, order, batch_size, drop_last, options, part, shares, skipped)
    assert _is_stream(dataset), "there are three kinds"
    # Every rank reads its own stream, so random augmentation must differ between ranks.
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
    """Build a loader of batches in the order of the dataset; `len()` works if the number of batches is known.

    Each pass yields the same batches. Iterating does not touch the global random generators, so an evaluation does not
    change the training. An empty dataset is accepted: it may be the shard of one rank. An existing loader is returned
    unchanged, and a generator is wrapped in `SinglePass`.
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


def read_apart(dataset: MapDataset, indices: Sequence[int], num_workers: int) -> list[Any]:
    """Return samples in this order, read by a worker process if there are workers.

    A dataset may open its files at the first read. Workers that are forked afterwards would share the open files.
    """
    options = _loader_options(None, min(num_workers, 1), False, False, None)
    loader: DataLoader[Any] = DataLoader(
        cast(Dataset[Any], dataset), batch_size=None, sampler=indices, **{**options, "collate_fn": None}
    )
    return list(loader)


def is_resumable(loader: object) -> bool:
    """Return whether a loader has the methods of `ResumableLoader`."""
    needed = ("num_batches", "set_epoch", "state_dict", "load_state_dict", "close")
    return all(hasattr(loader, name) for name in needed)


def adapted_loader(loader: Iterable[Any], set_dataset_epoch: bool, part: Part = WHOLE) -> ResumableLoader:
    """Wrap an iterable of batches in a resumable loader; use its own state if it has state methods."""
    if _keeps_state(loader):
        return StatefulLoader(loader, set_dataset_epoch, part)
    return CountingLoader(_ready_loader(loader), set_dataset_epoch, part)


def kind_of(dataset: object) -> str:
    """Return "iterable", "loader" or "map"; raise ValueError for any other object."""
    # Hugging Face's IterableDataset is not always a subclass of torch's, so compare names without importing datasets.
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
        f"{name_of(dataset)} cannot be used as a dataset: it needs __len__ and __getitem__ (samples by index), __iter__ "
        "as a torch IterableDataset (a stream of samples), or only __iter__ (a loader of batches)."
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
    # Generators, zip, map and itertools objects can be read only once. Iterators of other classes may restart.
    if isinstance(loader, Iterator) and type(loader).__module__ in ("builtins", "itertools"):
        return SinglePass(loader)
    return loader


def _problem_with(dataset: object) -> str | None:
    """Return an error message if the object is a common mistake, such as a path or a class; otherwise None."""
    if isinstance(dataset, Mapping):
        return _problem_with_mapping(dataset)
    if isinstance(dataset, (str, bytes)):
        return (
            f"The string {dataset!r} is not a dataset. Load the dataset first, such as with "
            f"datasets.load_dataset({dataset!r}, split='train'), and pass the result."
        )
    if isinstance(dataset, type):
        return f"The class {dataset.__qualname__} is not a dataset: pass an instance, {dataset.__qualname__}(...)."
    if inspect.isroutine(dataset):
        name = dataset.__qualname__
        return f"The function {name} is not a dataset. Pass its result; instead of a generator, pass {ITERABLE_REMEDY}"
    return None


def _problem_with_mapping(dataset: Mapping[Any, Any]) -> str:
    keys, values = list(dataset)[:5], list(dataset.values())
    is_of_columns = all(isinstance(value, (torch.Tensor, np.ndarray, list, tuple)) for value in values)
    if values and is_of_columns and not set(_SPLITS) & set(keys):
        return (
            f"A {name_of(dataset)} of columns, {keys}, is not a dataset: samples are read by index. Convert it with "
            "datasets.Dataset.from_dict(...), or pass a list with one dict for each sample."
        )
    return (
        f"{name_of(dataset)} is a mapping with the keys {keys}, not a dataset. Pass one of its entries, such as "
        'dataset["train"].'
    )


@functools.cache
def _leave_garbage_to_parent() -> None:
    """Disable garbage collection of inherited objects in forked processes."""
    # A worker would destroy an unreferenced process group that it inherited. The destructor waits forever for threads
    # of the group, or crashes, because fork does not copy threads. Hooks of other modules run in the child before ours
    # and may start a collection, so the parent disables it before the fork.
    was_enabled: list[bool] = []

    def pause() -> None:
        was_enabled.append(gc.isenabled())
        gc.disable()

    def resume() -> None:
        # Threads may fork at the same time. The last one to resume removes the entry of the first one to pause.
        if was_enabled.pop():
            gc.enable()

    def resume_in_child() -> None:
        gc.freeze()
        if any(was_enabled):
            gc.enable()
        was_enabled.clear()

    os.register_at_fork(before=pause, after_in_parent=resume, after_in_child=resume_in_child)


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
        "collate_fn": ExplainingCollator(
            collate_fn or collate_samples, is_own=getattr(collate_fn, "is_own", collate_fn is None)
        ),
        "num_workers": num_workers,
        # Without an accelerator torch warns at every epoch that pinned memory has no use.
        "pin_memory": pin_memory and torch.accelerator.is_available(),
        "persistent_workers": persistent_workers and num_workers > 0,
        "prefetch_factor": prefetch_factor,
        "worker_init_fn": leave_signals_to_parent,
        # Without a separate generator, each new iterator would draw its worker seed from the global generator. A resumed
        # run creates more iterators than an uninterrupted run, so its random state would differ.
        "generator": torch.Generator(),
    }


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} cannot be used: a batch has at least 1 sample.")
