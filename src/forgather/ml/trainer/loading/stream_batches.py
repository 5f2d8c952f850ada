"""StreamBatches: batches of an iterable dataset, in this process or in workers, with a position after every batch.

Positions have the format of torchdata's StatefulDataLoader, which earlier versions used, so that their checkpoints still
load. `StreamLoader` wraps it.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from forgather.ml.trainer.loading.data_order import SeededStream, is_stateful
from forgather.ml.trainer.loading.data_types import CollateFn
from forgather.ml.trainer.loading.epoch_loader import shut_down


class StreamBatches:
    """Loader of a stream. Iterating starts an epoch, or continues at a loaded position.

    A worker sends the state of its stream with each batch. The position is therefore after the last batch that was
    handed out, regardless of prefetched batches.
    """

    def __init__(self, stream: SeededStream, batch_size: int, drop_last: bool, options: Mapping[str, Any]) -> None:
        self.dataset = stream
        self.batch_size, self.drop_last = batch_size, drop_last
        self._batches = _Batches(stream, batch_size, drop_last, options["collate_fn"])
        # With batch_size=None torch does not batch again: `_Batches` yields finished batches, collated in the worker.
        self._loader: DataLoader[Any] = DataLoader(
            self._batches, batch_size=None, **{**options, "collate_fn": _unchanged}
        )
        self._pass: _Pass | None = None
        self._state_to_load: Mapping[str, Any] | None = None

    @property
    def num_workers(self) -> int:
        return self._loader.num_workers

    @property
    def persistent_workers(self) -> bool:
        return self._loader.persistent_workers

    @property
    def generator(self) -> torch.Generator:
        generator: torch.Generator = self._loader.generator
        return generator

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the newest iterator."""
        if self._pass is None:
            raise RuntimeError("A stream has no position before it is iterated.")
        return self._pass.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iterator start at this position."""
        self._state_to_load = state

    def __iter__(self) -> Iterator[Any]:
        state, self._state_to_load = self._state_to_load, None
        if state is not None:
            # Workers get a copy of `start` when their process starts, so running workers must be replaced.
            self.close()
            self._batches.start = _Start.of(state, self.num_workers, self.persistent_workers)
        self._pass = _Pass(self._batches, iter(self._loader), self.num_workers, self._batches.start)
        if self.num_workers > 0:
            # Only the copies in the workers use it. New workers of the next epoch must not start there again.
            self._batches.start = None
        return self._pass

    def close(self) -> None:
        """Stop all workers."""
        iterator = self._loader._iterator
        self._loader._iterator = None
        if iterator is not None:
            shut_down(iterator)


class _Start(NamedTuple):
    """Position to start at."""

    states: Mapping[int, Mapping[str, Any]]
    """States by worker; 0 is also the main process."""
    last_worker: int
    """Worker of the last batch that was handed out."""
    finished: bool
    """Whether the epoch was over, so that the position is the start of the next epoch."""

    @classmethod
    def of(cls, state: Mapping[str, Any], num_workers: int, persistent_workers: bool) -> "_Start | None":
        finished = bool(state.get("_iterator_finished", False))
        if num_workers == 0:
            return cls({0: state}, 0, finished) if "dataset_state" in state else None
        snapshot = state.get("_snapshot", {})
        workers = snapshot.get("_worker_snapshots", {})
        states = {number: workers[_key(number)] for number in range(num_workers) if _key(number) in workers}
        if len(states) < num_workers or (finished and not persistent_workers):
            # New workers copy the dataset of this process, which other workers never change, so nothing is restored.
            return None
        return cls(states, snapshot.get("_last_yielded_worker_id", num_workers - 1), finished)


class _Note(NamedTuple):
    """State of a worker that is sent with each batch, or without one."""

    worker: int
    state: dict[str, Any]
    has_batch: bool


class _Opaque:
    """Wrapper that hides a note from the pin_memory thread, which would otherwise copy its tensors."""

    def __init__(self, note: _Note) -> None:
        self.note = note


class _Batches(IterableDataset[Any]):
    """Batches of a stream in one process; in a worker each comes with a note."""

    def __init__(self, stream: SeededStream, batch_size: int, drop_last: bool, collate_fn: CollateFn) -> None:
        self.start: _Start | None = None
        self._stream = stream
        self._batch_size, self._drop_last = batch_size, drop_last
        self._collate_fn = collate_fn
        self._samples: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        start, self.start = self.start, None
        self._samples = self._begin(start, 0 if worker is None else worker.id)
        return self._in_order() if worker is None else self._with_notes(worker.id, start)

    def state_dict(self) -> dict[str, Any]:
        of_iterator = self._samples.state_dict() if is_stateful(self._samples) else None
        of_dataset = self._stream.state_dict() if is_stateful(self._stream) else None
        return {"fetcher_state": {"dataset_iter_state": of_iterator}, "dataset_state": of_dataset}

    def _begin(self, start: _Start | None, number: int) -> Iterator[Any]:
        if start is None:
            return iter(self._stream)
        state = start.states[number]
        if (of_dataset := state.get("dataset_state")) is not None and is_stateful(self._stream):
            self._stream.load_state_dict(of_dataset)
        samples = iter(self._stream)
        of_iterator = (state.get("fetcher_state") or {}).get("dataset_iter_state")
        if of_iterator is not None and is_stateful(samples):
            samples.load_state_dict(of_iterator)
        # The state of a dataset may carry over to the next epoch, the state of an iterator does not. A new iterator
        # starts the next epoch.
        return iter(self._stream) if start.finished else samples

    def _in_order(self) -> Iterator[Any]:
        samples = self._samples
        while batch := list(itertools.islice(samples, self._batch_size)):
            is_last = len(batch) < self._batch_size
            if is_last and self._drop_last:
                return
            yield self._collate_fn(batch)
            if is_last:
                return

    def _with_notes(self, number: int, start: _Start | None) -> Iterator[Any]:
        # The initial state, in case a checkpoint is saved before the first batch of this worker.
        yield None, self._note(number)
        if start is not None and not start.finished and number <= start.last_worker:
            # The DataLoader polls workers in turn and always starts with worker 0. Workers up to `last_worker` had their
            # turn in this round before the checkpoint. An item without a batch lets them skip it.
            yield None, self._note(number)
        for batch in self._in_order():
            yield batch, self._note(number, True)
        # The state at the end is part of the position too, even if it comes without a batch.
        yield None, self._note(number)

    def _note(self, number: int, has_batch: bool = False) -> _Opaque:
        return _Opaque(_Note(number, self.state_dict(), has_batch))


class _Pass(Iterator[Any]):
    """Iterator over an epoch of a stream, or over the rest of an epoch."""

    def __init__(self, batches: _Batches, iterator: Iterator[Any], num_workers: int, start: _Start | None) -> None:
        self._batches = batches
        self._iterator = iterator
        self._num_workers = num_workers
        # Every worker reports its state before its first batch. Until then the position is the one to start at.
        begin = _Start({}, num_workers - 1, False) if start is None or start.finished else start
        self._states, self._last_worker = dict(begin.states), begin.last_worker
        self._finished = False

    def __next__(self) -> object:
        try:
            return next(self._iterator) if self._num_workers == 0 else self._next_of_workers()
        except StopIteration:
            self._finished = True
            raise

    def _next_of_workers(self) -> object:
        while True:
            batch, opaque = next(self._iterator)
            number, state, has_batch = opaque.note
            self._states[number] = state
            if has_batch:
                self._last_worker = number
                return batch

    def state_dict(self) -> dict[str, Any]:
        if self._num_workers == 0:
            return {**self._batches.state_dict(), "_iterator_finished": self._finished}
        workers = {_key(number): {"worker_id": number, **state} for number, state in sorted(self._states.items())}
        snapshot = {"_worker_snapshots": workers, "_last_yielded_worker_id": self._last_worker}
        return {"_snapshot": snapshot, "_steps_since_snapshot": 0, "_iterator_finished": self._finished}

    def close(self) -> None:
        if self._num_workers > 0:
            shut_down(self._iterator)


def _unchanged(batch: object) -> object:
    # A module-level function, because spawned workers unpickle it by name.
    return batch


def _key(worker: int) -> str:
    return f"worker_{worker}"
