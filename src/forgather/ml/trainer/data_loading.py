"""Loaders whose position can be saved at any batch and restored without reading through the data.

map-style dataset    the position in a global, seeded order (`data_order`): seed, epoch, index of the next sample
iterable dataset     torchdata's StatefulDataLoader, which keeps the dataset's own state where it has one
ready loader         its own state; without one, the number of batches, which a resume has to skip one by one
"""

import contextlib
import functools
import gc
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from forgather.ml.trainer.data_collator import collate_samples
from forgather.ml.trainer.data_order import (
    SKIP_REMEDY,
    WHOLE,
    DataOrder,
    Part,
    PositionedBatches,
    SeededSamples,
    SeededStream,
    agreed_seed,
    generators_apart,
    host_generators,
    is_stateful,
    require_keys,
    seeded_stream,
    stable_seed,
)
from forgather.ml.trainer.empty_batch import emptied
from forgather.ml.trainer.signals import leave_signals_to_parent

logger = logging.getLogger(__name__)

CollateFn = Callable[[list[Any]], Any]


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

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def close(self) -> None:
        """Ends workers and iterators and keeps the position; iterating again starts new ones."""


def build_train_loader(
    dataset: Any,
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
    kind = kind_of(dataset)
    if kind == "loader":
        ready = _StatefulLoader if is_stateful(dataset) else _CountingLoader
        return ready(dataset, set_dataset_epoch, part)
    _check_batch_size(batch_size)
    options = _loader_options(collate_fn, num_workers, pin_memory, persistent_workers, prefetch_factor)
    if kind == "map":
        samples = SeededSamples(dataset, set_dataset_epoch)
        order = DataOrder(0, seed=seed, shuffle=shuffle)
        return _OrderedLoader(samples, order, batch_size, drop_last, options, part)
    own_seed = seed if part.number == 0 else stable_seed(seed, part.number)
    stream = seeded_stream(
        dataset, seed=own_seed, batch_size=batch_size, forward_epoch=set_dataset_epoch, in_workers=num_workers > 0
    )
    return _StreamLoader(stream, batch_size, drop_last, options, part)


def build_eval_loader(
    dataset: Any,
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
    is accepted: it may be one rank's share. A ready loader is returned as it is.
    """
    kind = kind_of(dataset)
    if kind == "loader":
        return dataset
    _check_batch_size(batch_size)
    options = _loader_options(collate_fn, num_workers, pin_memory, persistent_workers, prefetch_factor)
    if kind == "map":
        order = DataOrder(len(dataset), seed=0, shuffle=False)
        batches = PositionedBatches(order, batch_size, drop_last, part=part, fills_up=False)
        return DataLoader(_as_dataset(SeededSamples(dataset, False)), batch_sampler=batches, **options)
    stream = seeded_stream(dataset, seed=0, batch_size=batch_size, forward_epoch=False, in_workers=num_workers > 0)
    return DataLoader(stream, batch_size=batch_size, drop_last=drop_last, **options)


class _EpochLoader:
    """Hands out the batches of an epoch over any number of iterators, which all continue the same pass."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._iterator: Iterator[Any] | None = None
        self._epoch = 0
        self._finished = False

    @property
    def dataset(self) -> Any:
        """What the caller gave, if it is not a loader without one."""
        return getattr(self._loader, "dataset", None)

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
                # a worker would go on with the batch after the one that failed, and the position would be wrong
                self.close()
                raise
            yield self._counted(batch)

    def close(self) -> None:
        self._keep_position()
        self._end_workers()

    def _end_workers(self) -> None:
        # a loader that is its own iterator is not ours to end
        if self._iterator is not self._loader:
            _shut_down(self._iterator)
        self._iterator = None
        if isinstance(self._loader, DataLoader):
            _shut_down(self._loader._iterator)
            # torch would wait for ever for the workers of this iterator
            self._loader._iterator = None

    def _pause(self) -> None:
        """Leaves the pass that is under way; workers that are to outlive an epoch stay."""
        if getattr(self._loader, "persistent_workers", False):
            self._iterator = None
        else:
            self._end_workers()

    def _finish(self) -> None:
        self._finished = True
        self._pause()

    def _open(self) -> Iterator[Any]:
        """An iterator from the position to the end of the epoch."""
        raise NotImplementedError

    def _start_epoch(self, epoch: int) -> None:
        """Moves to the beginning of an epoch."""
        raise NotImplementedError

    def _counted(self, batch: Any) -> Any:
        """Moves the position behind the batch, which is about to be handed out."""
        return batch

    def _keep_position(self) -> None:
        """Takes the position out of the iterator that is about to end."""


class _OrderedLoader(_EpochLoader):
    """A map-style dataset in a global order."""

    def __init__(
        self,
        samples: SeededSamples,
        order: DataOrder,
        batch_size: int,
        drop_last: bool,
        options: dict[str, Any],
        part: Part = WHOLE,
    ) -> None:
        self._samples = samples
        self._order = order
        self._batches = PositionedBatches(order, batch_size, drop_last, options["num_workers"] > 0, part)
        super().__init__(DataLoader(_as_dataset(samples), batch_sampler=self._batches, **options))
        self._start_epoch(0)

    @property
    def dataset(self) -> Any:
        return self._samples.dataset

    @property
    def batch_size(self) -> int | None:
        return self._batches.batch_size

    @property
    def num_batches(self) -> int | None:
        return len(self._batches)

    def state_dict(self) -> dict[str, Any]:
        return self._order.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        require_keys(state, ("seed", "epoch", "index", "num_samples"), "a dataset with numbered samples")
        self._pause()
        # a dataset may have another length in each epoch
        self._samples.tell_epoch(state["epoch"])
        self._order.load_state_dict(state, len(self._samples))
        self._epoch, self._finished = self._order.epoch, False

    def _start_epoch(self, epoch: int) -> None:
        self._samples.tell_epoch(epoch)
        num_samples = len(self._samples)
        per_round = self._batches.batch_size * self._batches.part.num_parts
        _check_length(self.dataset, num_samples, per_round, self._batches.drop_last)
        self._order.start_epoch(epoch, num_samples)

    def _open(self) -> Iterator[Any]:
        if self._batches.end_of_round(self._order.index) == self._order.index:
            return iter(())  # no workers for an epoch that is over
        if self._loader.num_workers == 0 and not self._loader.pin_memory:
            return self._read_here()
        self._loader.generator.manual_seed(stable_seed(self._order.seed, self._order.epoch))
        return iter(self._loader)

    def _read_here(self) -> Iterator[Any]:
        """What torch's loader does without workers, less its bookkeeping, which costs as much as reading small batches."""
        collate = self._loader.collate_fn
        for request in self._batches:
            yield collate(self._samples.__getitems__(request))

    def _counted(self, batch: Any) -> Any:
        start = self._order.index
        self._order.index = self._batches.end_of_round(start)
        # Alone there is no round without a batch.
        return emptied(batch) if self._batches.part.num_parts > 1 and self._batches.is_empty(start) else batch


class _WrappingLoader(_EpochLoader):
    """A loader that knows its own position, or at least can be read again up to one."""

    def __init__(self, loader: Any, forward_epoch: bool, part: Part = WHOLE) -> None:
        super().__init__(loader)
        self._forward_epoch = forward_epoch
        self._part = part
        # batches of this epoch that were handed out
        self._num_done = 0
        # the global generators when the epoch began, for a loader that has to be read again from there
        self._generators_at_start: dict[str, Any] | None = None
        self._tell_epoch(0)
        _check_length(loader if self.dataset is None else self.dataset, self.num_batches)

    @property
    def batch_size(self) -> int | None:
        return getattr(self._loader, "batch_size", None)

    @property
    def num_batches(self) -> int | None:
        return _length_of(self._loader)

    def _tell_epoch(self, epoch: int) -> None:
        if self._forward_epoch:
            for listener in _epoch_listeners(self._loader):
                listener.set_epoch(epoch)

    def _start_epoch(self, epoch: int) -> None:
        self._generators_at_start = None
        self._num_done = 0
        self._tell_epoch(epoch)

    def _counted(self, batch: Any) -> Any:
        self._num_done += 1
        return batch

    def _position(self) -> dict[str, Any]:
        generators = None if self._finished else self._generators_at_start
        return {"epoch": self._epoch, "finished": self._finished, "generators": generators, "part": list(self._part)}

    def _move(self, state: Mapping[str, Any]) -> None:
        part = tuple(state["part"])
        if part != self._part:
            was, now = (f"part {number} of {num_parts}" for number, num_parts in (part, self._part))
            raise ValueError(
                f"The data position in the checkpoint is that of {was} of the data, and this rank reads {now}. Only a dataset "
                "with numbered samples can be divided anew. Use as many ranks as before and the same dispatch_batches, "
                f"{SKIP_REMEDY}."
            )
        self._end_workers()
        self._epoch, self._finished = state["epoch"], state["finished"]
        self._generators_at_start = state["generators"]
        self._tell_epoch(self._epoch)


class _CountingLoader(_WrappingLoader):
    """A ready loader without a state: its position is a number of batches."""

    def state_dict(self) -> dict[str, Any]:
        return {**self._position(), "num_batches_done": self._num_done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        require_keys(state, ("epoch", "finished", "generators", "num_batches_done"), "a loader without a state")
        self._move(state)
        self._num_done = state["num_batches_done"]

    def _open(self) -> Iterator[Any]:
        if self._num_done == 0:
            self._generators_at_start = host_generators()
            return iter(self._loader)
        logger.warning(
            "%s has no state_dict, so that its position can only be found by reading the %d batches before it again. "
            "Give the trainer the dataset, or a torchdata StatefulDataLoader, to resume without reading.",
            _name(self._loader),
            self._num_done,
        )
        return _read_again(self._loader, self._num_done, self._generators_at_start)


class _StatefulLoader(_WrappingLoader):
    """A loader with `state_dict` and `load_state_dict`, such as torchdata's."""

    def __init__(self, loader: Any, forward_epoch: bool, part: Part = WHOLE) -> None:
        super().__init__(loader, forward_epoch, part)
        # the position while no iterator has it; None at the beginning of an epoch
        self._idle_state: Any = None
        # what the loader has yet to take; once the next epoch began, the state at the end of the one before
        self._state_to_load: Any = None

    def state_dict(self) -> dict[str, Any]:
        # asked of a loader that has not begun, torchdata would start the workers
        loader_state = self._idle_state if self._iterator is None else self._loader.state_dict()
        return {**self._position(), "loader": loader_state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        require_keys(state, ("epoch", "finished", "generators", "loader"), "a loader with a state")
        self._move(state)
        self._idle_state = self._state_to_load = state["loader"]

    def _start_epoch(self, epoch: int) -> None:
        super()._start_epoch(epoch)
        self._idle_state = None
        if not self._finished:
            self._state_to_load = None

    def _finish(self) -> None:
        self._idle_state = self._loader.state_dict()
        super()._finish()

    def _keep_position(self) -> None:
        if self._iterator is not None:
            self._idle_state = self._state_to_load = self._loader.state_dict()

    def _open(self) -> Iterator[Any]:
        if self._idle_state is None:
            self._generators_at_start = host_generators()
        iterator = iter(self._loader) if self._state_to_load is None else self._open_restored()
        self._state_to_load = None
        return iterator

    def _open_restored(self) -> Iterator[Any]:
        self._loader.load_state_dict(self._state_to_load)
        if self._idle_state is None:
            return self._open_after_the_end()
        with generators_apart(self._generators_at_start), _explaining_an_early_end():
            return iter(self._loader)

    def _open_after_the_end(self) -> Iterator[Any]:
        """An epoch whose predecessor was finished before the checkpoint was saved."""
        with generators_apart():
            iterator = iter(self._loader)
        if isinstance(self._loader, DataLoader) and self._loader.generator is None:
            # the seed of the workers, which torch draws once at the beginning of an epoch
            torch.empty((), dtype=torch.int64, device="cpu").random_()
        first = list(itertools.islice(iterator, 1))
        if not first:
            # some loaders and samplers go through the empty rest of the old epoch first
            with generators_apart():
                iterator = iter(self._loader)
        return itertools.chain(first, iterator)


class _StreamLoader(_StatefulLoader):
    """An iterable dataset, batched by torchdata.

    When an epoch is cut short in the main process, a dataset that keeps its position goes on from there in the next.
    """

    def __init__(
        self, stream: SeededStream, batch_size: int, drop_last: bool, options: dict[str, Any], part: Part
    ) -> None:
        # only iterable datasets need it
        from torchdata.stateful_dataloader import StatefulDataLoader

        self._stream = stream
        self._has_warned = False
        _check_length(stream.dataset, _length_of(stream), batch_size, drop_last)
        loader = StatefulDataLoader(stream, batch_size=batch_size, drop_last=drop_last, **options)
        super().__init__(loader, True, part)

    @property
    def dataset(self) -> Any:
        return self._stream.dataset

    @property
    def num_batches(self) -> int | None:
        num_samples = _length_of(self._stream)
        if num_samples is None:
            return None
        whole, rest = divmod(num_samples, self._loader.batch_size)
        return whole + (rest > 0 and not self._loader.drop_last)

    def state_dict(self) -> dict[str, Any]:
        settings = {"batch_size": self._loader.batch_size, "num_workers": self._loader.num_workers}
        return {**super().state_dict(), "seed": self._stream.seed, "num_batches_read": self._num_done, **settings}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        keys = ("loader", "seed", "num_batches_read", "batch_size", "num_workers")
        require_keys(state, keys, "an iterable dataset")
        if not state["finished"] and state["loader"] is not None:
            self._check_settings(state)
        super().load_state_dict(state)
        self._stream.seed = agreed_seed(self._stream.seed, state["seed"])
        self._num_done = state["num_batches_read"]

    def _open(self) -> Iterator[Any]:
        self._loader.generator.manual_seed(stable_seed(self._stream.seed, self._epoch))
        return super()._open()

    def _open_restored(self) -> Iterator[Any]:
        if self._idle_state is None or _holds_dataset_state(self._state_to_load):
            return super()._open_restored()
        # torchdata would read through the data by itself, but count what it reads twice, and lose as much next time.
        return _read_again(self._loader, self._num_done, self._generators_at_start)

    def _pause(self) -> None:
        if self._finished:
            super()._pause()
        else:
            # in the middle of an epoch, a worker's copy of a dataset with state would go on from where it was left
            self._end_workers()

    def _finish(self) -> None:
        super()._finish()
        if not _holds_dataset_state(self._idle_state):
            # torchdata would read through the whole epoch only to find its end
            self._idle_state = None

    def _check_settings(self, state: Mapping[str, Any]) -> None:
        reads_again = not _holds_dataset_state(state["loader"])
        # each worker has a position of its own; without state, positions are counted in batches
        fixed = {"num_workers": "dataloader_num_workers", "batch_size": "per_device_train_batch_size"}
        for name, argument in list(fixed.items())[: 1 + reads_again]:
            present = getattr(self._loader, name)
            if present != state[name]:
                raise ValueError(
                    f"The position of {_name(self.dataset)} in the checkpoint was saved with {argument}={state[name]} "
                    f"and cannot be used with {present}. Set it back, {SKIP_REMEDY}."
                )
        if reads_again and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s has no state_dict and load_state_dict: resuming reads through its data up to the position. Give it "
                "these methods to resume at once.",
                _name(self.dataset),
            )


def kind_of(dataset: Any) -> str:
    """One of "iterable", "loader" and "map"."""
    # Hugging Face's iterable datasets need not be torch's
    if isinstance(dataset, IterableDataset) or any(
        base.__name__ == "IterableDataset" for base in type(dataset).__mro__
    ):
        return "iterable"
    if isinstance(dataset, DataLoader):
        return "loader"
    if isinstance(dataset, Mapping):
        raise ValueError(
            f"{_name(dataset)} is a mapping with the keys {list(dataset)[:5]}, not a dataset: choose one of its entries, "
            'such as dataset["train"].'
        )
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return "map"
    if hasattr(dataset, "__iter__") and not isinstance(dataset, Dataset):
        return "loader"
    raise ValueError(
        f"{_name(dataset)} cannot be used as a dataset: it needs __len__ and __getitem__ (samples by number), __iter__ "
        "as a torch IterableDataset (a stream of samples), or __iter__ alone (a loader of ready batches)."
    )


def _as_dataset(samples: SeededSamples) -> Dataset[Any]:
    # torch only asks for the methods; its base class would bring in a __getitem__ that fails
    return cast(Dataset[Any], samples)


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
        "collate_fn": collate_samples if collate_fn is None else collate_fn,
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


def _check_length(dataset: Any, length: int | None, batch_size: int = 1, drop_last: bool = False) -> None:
    if length == 0:
        raise ValueError(
            f"The training dataset ({_name(dataset)}) is empty. Check that its path and split are right, and that no "
            "filter, limit or sharding removed all of its samples."
        )
    if drop_last and length is not None and length < batch_size:
        raise ValueError(
            f"The training dataset ({_name(dataset)}) has {length} samples, fewer than one batch of {batch_size}, and "
            "dataloader_drop_last=True drops incomplete batches, so that nothing is left. Use a smaller batch or more "
            "data, or keep the last batch."
        )


def _length_of(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def _name(item: Any) -> str:
    return type(item).__qualname__


def _epoch_listeners(loader: Any) -> list[Any]:
    """The loader, its dataset and its samplers, as far as they want to know the epoch."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    candidates = [
        loader,
        getattr(loader, "dataset", None),
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    ]
    return list({id(one): one for one in candidates if hasattr(one, "set_epoch")}.values())


def _shut_down(iterator: Any) -> None:
    """Ends the workers of an iterator of torch or torchdata, or closes a generator."""
    # torch does this when the iterator is collected, which a traceback or a cycle may put off for ever
    end = getattr(iterator, "_shutdown_workers", None) or getattr(iterator, "close", None)
    if end is not None:
        end()


def _read_again(loader: Any, num_batches: int, generators: Mapping[str, Any] | None) -> Iterator[Any]:
    """An iterator behind so many batches, read as they were the first time."""
    with generators_apart(generators), _explaining_an_early_end(num_batches):
        iterator = iter(loader)
        for _ in range(num_batches):
            next(iterator)
    return iterator


def _holds_dataset_state(loader_state: Mapping[str, Any]) -> bool:
    """Whether torchdata found a state in the dataset or its iterator, in the main process or in any worker."""
    workers = loader_state.get("_snapshot", {}).get("_worker_snapshots", {"main process": loader_state})
    return any(
        worker.get("dataset_state") is not None or (worker.get("fetcher_state") or {}).get("dataset_iter_state")
        for worker in workers.values()
    )


@contextlib.contextmanager
def _explaining_an_early_end(num_batches: int | None = None) -> Iterator[None]:
    try:
        yield
    except StopIteration:
        count = "" if num_batches is None else f", which is {num_batches} batches into the epoch"
        raise ValueError(
            f"The training data ended before the position in the checkpoint{count}: there is less of it now than when "
            f"the checkpoint was saved. Use the same data, {SKIP_REMEDY}."
        ) from None
