"""Resumable wrappers of streams and DataLoaders: restore their own state, or read the batches again up to the position.

A resumed run draws the same random numbers as an uninterrupted run: repeated reads use the random state of the start
of the epoch and do not change the current one. `builders` creates these loaders.
"""

import contextlib
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from forgather.ml.checkpoint.state.state_schema import (
    Schema,
    anything,
    count,
    flag,
    integer,
    list_of,
    mapping_of,
    optional,
    positive,
    text,
)
from forgather.ml.distributed.watch import note_progress
from forgather.ml.trainer.loading.data_order import (
    DRAWS,
    SKIP_REMEDY,
    WHOLE,
    Part,
    SeededStream,
    agreed_seed,
    is_stateful,
    require_keys,
    stable_seed,
)
from forgather.ml.trainer.loading.data_types import Batch, StatefulBatches
from forgather.ml.trainer.loading.epoch_loader import EpochLoader, LoaderT, check_length, length_of, name_of
from forgather.ml.trainer.loading.random_numbers import (
    generator_states,
    generators_apart,
    host_generators,
    known_generators,
)
from forgather.ml.trainer.loading.stream_batches import StreamBatches

logger = logging.getLogger(__name__)

_POSITION = {
    "epoch": count,
    "finished": flag,
    "generators": optional(generator_states),
    "part": list_of(count, length=2),
}
# Older checkpoints have no "part": their position is for unsharded data.
_ADDED = ("part",)
_COUNTING = Schema({**_POSITION, "num_batches_done": count}, _ADDED)
_STATEFUL = Schema({**_POSITION, "loader": anything}, _ADDED)

# State of a stream in one process. The counts are fields of torchdata, which earlier versions used for streams.
_OF_PROCESS: dict[str, Any] = {
    "dataset_state": anything,
    "fetcher_state": optional(Schema({"dataset_iter_state": optional(DRAWS)}, ["dataset_iter_state"])),
    "_num_yielded": count,
    "_sampler_iter_yielded": count,
}
_PROCESS = Schema(_OF_PROCESS, _OF_PROCESS)
_OF_WORKERS = {"_worker_snapshots": mapping_of(text, _PROCESS), "_last_yielded_worker_id": count}
_SNAPSHOT = Schema(_OF_WORKERS, _OF_WORKERS)
_OF_STREAM = {**_OF_PROCESS, "_snapshot": _SNAPSHOT, "_steps_since_snapshot": count, "_iterator_finished": flag}
_STREAM = Schema(
    {
        **_POSITION,
        "loader": optional(Schema(_OF_STREAM, _OF_STREAM)),
        "seed": integer,
        "num_batches_read": count,
        "batch_size": positive,
        "num_workers": count,
    },
    _ADDED,
)


class WrappingLoader(EpochLoader[LoaderT]):
    """Base class of wrappers of a loader that has a state, or can be read again up to a position."""

    def __init__(self, loader: LoaderT, forward_epoch: bool, part: Part = WHOLE) -> None:
        super().__init__(loader)
        self._forward_epoch = forward_epoch
        self._part = part
        # Number of batches of this epoch that were handed out.
        self._num_done = 0
        # Global random state at the start of the epoch, for a loader that has to be read again from there.
        self._generators_at_start: dict[str, Any] | None = None
        self._tell_epoch(0)
        check_length(loader if self.dataset is None else self.dataset, self.num_batches)

    @property
    def batch_size(self) -> int | None:
        return getattr(self._loader, "batch_size", None)

    @property
    def num_batches(self) -> int | None:
        return length_of(self._loader)

    def _tell_epoch(self, epoch: int) -> None:
        if self._forward_epoch:
            for listener in _epoch_listeners(self._loader):
                listener.set_epoch(epoch)

    def _start_epoch(self, epoch: int) -> None:
        self._generators_at_start = None
        self._num_done = 0
        self._tell_epoch(epoch)

    def _counted(self, batch: Batch) -> Batch:
        self._num_done += 1
        return batch

    def _position(self) -> dict[str, Any]:
        # The random state is needed only to read the rest of an epoch again.
        generators = None if self._finished else self._generators_at_start
        return {"epoch": self._epoch, "finished": self._finished, "generators": generators, "part": list(self._part)}

    def _check_part(self, state: Mapping[str, Any]) -> None:
        part = tuple(state.get("part", WHOLE))
        if part != self._part:
            was, now = (f"part {number} of {num_parts}" for number, num_parts in (part, self._part))
            raise ValueError(
                f"The data position in the checkpoint is for {was} of the data, but this rank reads {now}. Only a map-style "
                "dataset can be resharded. Use the same number of ranks and the same dispatch_batches as before, "
                f"{SKIP_REMEDY}."
            )

    def _move(self, state: Mapping[str, Any]) -> None:
        self._end_workers()
        self._epoch, self._finished = state["epoch"], state["finished"]
        self._generators_at_start = known_generators(state["generators"])
        self._tell_epoch(self._epoch)


class CountingLoader(WrappingLoader[Iterable[Any]]):
    """Wrapper of a loader without state methods; its position is a number of batches."""

    def state_dict(self) -> dict[str, Any]:
        return {**self._position(), "num_batches_done": self._num_done}

    def check_state_dict(self, state: object) -> None:
        keys = ("epoch", "finished", "generators", "num_batches_done")
        position = require_keys(state, keys, "a loader without a state")
        _COUNTING.check(position, "dataset")
        self._check_part(position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check_state_dict(state)
        self._move(state)
        self._num_done = state["num_batches_done"]

    def _open(self) -> Iterator[Any]:
        if self._num_done == 0:
            # Saved before iter(), which draws the order of a shuffled DataLoader from the global generators.
            self._generators_at_start = host_generators()
            return iter(self._loader)
        logger.warning(
            "%s has no state_dict, so resuming reads the first %d batches again. Pass the dataset or a torchdata "
            "StatefulDataLoader to the trainer to resume without reading.",
            name_of(self._loader),
            self._num_done,
        )
        return _read_again(self._loader, self._num_done, self._generators_at_start)


StatefulT = TypeVar("StatefulT", bound=StatefulBatches)


class StatefulLoader(WrappingLoader[StatefulT]):
    """Wrapper of a loader with `state_dict` and `load_state_dict`, such as torchdata's StatefulDataLoader."""

    def __init__(self, loader: StatefulT, forward_epoch: bool, part: Part = WHOLE) -> None:
        super().__init__(loader, forward_epoch, part)
        # Position while no iterator is open; None at the start of an epoch.
        self._idle_state: Mapping[str, Any] | None = None
        # State that the next iterator must load. At the start of an epoch it is the final state of the previous epoch.
        self._state_to_load: Mapping[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        # Without an iterator, state_dict() of torchdata would start the workers.
        loader_state = self._idle_state if self._iterator is None else self._loader.state_dict()
        return {**self._position(), "loader": loader_state}

    def check_state_dict(self, state: object) -> None:
        position = require_keys(state, ("epoch", "finished", "generators", "loader"), "a loader with a state")
        _STATEFUL.check(position, "dataset")
        self._check_part(position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check_state_dict(state)
        self._move(state)
        self._idle_state = self._state_to_load = state["loader"]

    def _start_epoch(self, epoch: int) -> None:
        super()._start_epoch(epoch)
        self._idle_state = None
        # After a finished epoch the final state is kept: it may carry over to the next epoch. After an epoch that was
        # left early, the next one starts at its beginning.
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
            # The start of an epoch: opening the iterator may draw the order of the epoch from the global generators.
            self._generators_at_start = host_generators()
        iterator = iter(self._loader) if self._state_to_load is None else self._open_restored()
        self._state_to_load = None
        return iterator

    def _open_restored(self) -> Iterator[Any]:
        assert self._state_to_load is not None
        self._loader.load_state_dict(self._state_to_load)
        if self._idle_state is None:
            return self._open_after_the_end()
        with generators_apart(self._generators_at_start), _explaining_an_early_end():
            return iter(self._loader)

    def _open_after_the_end(self) -> Iterator[Any]:
        """Open the first epoch after a checkpoint that was saved at the end of the previous epoch."""
        # Opening a restored loader may draw other numbers than an uninterrupted run draws at the start of an epoch. So
        # these draws are undone, and the draw of an uninterrupted run is made explicitly.
        with generators_apart():
            iterator = iter(self._loader)
        if isinstance(self._loader, DataLoader) and self._loader.generator is None:
            # The DataLoader draws the base seed of its workers once at the start of an epoch.
            torch.empty((), dtype=torch.int64, device="cpu").random_()
        first = list(itertools.islice(iterator, 1))
        if not first:
            # Some loaders and samplers first iterate over the empty rest of the old epoch.
            with generators_apart():
                iterator = iter(self._loader)
        return itertools.chain(first, iterator)


class StreamLoader(StatefulLoader[StreamBatches]):
    """Resumable loader of an iterable dataset.

    If an epoch in the main process ends early, a dataset that keeps its own position continues from there in the next
    epoch.
    """

    def __init__(
        self, stream: SeededStream, batch_size: int, drop_last: bool, options: dict[str, Any], part: Part
    ) -> None:
        self._stream = stream
        self._has_warned = False
        check_length(stream.dataset, length_of(stream), batch_size, drop_last)
        super().__init__(StreamBatches(stream, batch_size, drop_last, options), True, part)

    @property
    def dataset(self) -> Iterable[Any]:
        return self._stream.dataset

    @property
    def num_batches(self) -> int | None:
        num_samples = length_of(self._stream)
        if num_samples is None:
            return None
        whole, rest = divmod(num_samples, self._loader.batch_size)
        has_rest = rest > 0 and not self._loader.drop_last
        return int(whole) + 1 if has_rest else int(whole)

    def state_dict(self) -> dict[str, Any]:
        settings = {"batch_size": self._loader.batch_size, "num_workers": self._loader.num_workers}
        return {**super().state_dict(), "seed": self._stream.seed, "num_batches_read": self._num_done, **settings}

    def check_state_dict(self, state: object) -> None:
        keys = ("loader", "seed", "num_batches_read", "batch_size", "num_workers")
        position = require_keys(state, keys, "an iterable dataset")
        super().check_state_dict(position)
        _STREAM.check(position, "dataset")
        if _goes_on_within_epoch(position):
            self._check_settings(self._without_lost_state(position))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check_state_dict(state)
        state = self._without_lost_state(state)
        super().load_state_dict(state)
        self._warn_of_reading_again(state)
        self._stream.seed = agreed_seed(self._stream.seed, state["seed"])
        self._num_done = state["num_batches_read"]

    def _without_lost_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Remove the dataset state of older checkpoints if it omits samples, so that batches are counted instead."""
        is_lost = state["loader"] is not None and _holds_dataset_state(state["loader"]) and self._is_read_again
        return {**state, "loader": None if state["finished"] else {}} if is_lost else state

    @property
    def _is_read_again(self) -> bool:
        return is_stateful(self.dataset) and not is_stateful(self._stream)

    def _open(self) -> Iterator[Any]:
        self._loader.generator.manual_seed(stable_seed(self._stream.seed, self._epoch))
        return super()._open()

    def _open_restored(self) -> Iterator[Any]:
        assert self._state_to_load is not None
        if self._idle_state is None or _holds_dataset_state(self._state_to_load):
            return super()._open_restored()
        return _read_again(self._loader, self._num_done, self._generators_at_start)

    def _end_workers(self) -> None:
        super()._end_workers()
        self._loader.close()

    def _pause(self) -> None:
        if self._finished:
            super()._pause()
        else:
            # In the middle of an epoch, the copy of a stateful dataset in a persistent worker would continue from there.
            self._end_workers()

    def _finish(self) -> None:
        super()._finish()
        if self._idle_state is not None and not _holds_dataset_state(self._idle_state):
            # Without a dataset state nothing carries over to the next epoch.
            self._idle_state = None

    def _check_settings(self, state: Mapping[str, Any]) -> None:
        reads_again = not _holds_dataset_state(state["loader"])
        # Each worker has a separate position. Without a state, positions are counted in batches, so their size matters.
        fixed = {"num_workers": "dataloader_num_workers"}
        if reads_again:
            fixed["batch_size"] = "per_device_train_batch_size"
        for name, argument in fixed.items():
            present = getattr(self._loader, name)
            if present != state[name]:
                raise ValueError(
                    f"The position of {name_of(self.dataset)} in the checkpoint was saved with {argument}={state[name]} "
                    f"and cannot be used with {present}. Set it back, {SKIP_REMEDY}."
                )

    def _warn_of_reading_again(self, state: Mapping[str, Any]) -> None:
        reads_again = _goes_on_within_epoch(state) and not _holds_dataset_state(state["loader"])
        if reads_again and not self._has_warned:
            self._has_warned = True
            reason, remedy = "has no state_dict and load_state_dict", "Add these methods to resume immediately."
            if self._is_read_again:
                reason = "has a shuffle buffer, which its state does not contain"
                remedy = "Without the buffer it resumes immediately."
            logger.warning(
                "%s %s: resuming reads its data again up to the position. %s", name_of(self.dataset), reason, remedy
            )


def _goes_on_within_epoch(state: Mapping[str, Any]) -> bool:
    return not state["finished"] and state["loader"] is not None


def _epoch_listeners(loader: object) -> list[Any]:
    """Return the loader, its dataset and its samplers if they have `set_epoch`."""
    # By identity, so that an object in two roles is called once.
    batch_sampler = getattr(loader, "batch_sampler", None)
    candidates = [
        loader,
        getattr(loader, "dataset", None),
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    ]
    return list({id(one): one for one in candidates if hasattr(one, "set_epoch")}.values())


def _read_again(loader: Iterable[Any], num_batches: int, generators: Mapping[str, Any] | None) -> Iterator[Any]:
    """Return an iterator after the first `num_batches` batches, which are read with their original random state."""
    # Only a resumed run reads these batches again, so the reads must leave the current random state unchanged.
    with generators_apart(generators), _explaining_an_early_end(num_batches):
        iterator = iter(loader)
        for _ in range(num_batches):
            next(iterator)
            # Together they may take longer than the limit of a batch.
            note_progress()
    return iterator


def _holds_dataset_state(loader_state: Mapping[str, Any]) -> bool:
    """Return whether the state holds a state of the dataset or its iterator, in the main process or in any worker."""
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
            f"The training data ended before the position in the checkpoint{count}: there is less data now than when "
            f"the checkpoint was saved. Use the same data, {SKIP_REMEDY}."
        ) from None
