"""Batches of iterable datasets, in this process or in workers, with a position that can be saved at any batch.

Positions have the form of torchdata's StatefulDataLoader, which read streams in earlier versions: their checkpoints load.
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
    """A loader of a stream. Iterating begins an epoch, or goes on at a loaded position.

    A worker sends the state of its stream with each batch, so that the position is behind the last batch that was handed
    out, whatever was prefetched.
    """

    def __init__(self, stream: SeededStream, batch_size: int, drop_last: bool, options: Mapping[str, Any]) -> None:
        self.dataset = stream
        self.batch_size, self.drop_last = batch_size, drop_last
        self._batches = _Batches(stream, batch_size, drop_last, options["collate_fn"])
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
        """The position of the iterator that was begun last."""
        if self._pass is None:
            raise RuntimeError("A stream has a position only once it is iterated.")
        return self._pass.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iterator begin at this position."""
        self._state_to_load = state

    def __iter__(self) -> Iterator[Any]:
        state, self._state_to_load = self._state_to_load, None
        if state is not None:
            # Workers take a position only when they start.
            self.close()
            self._batches.start = _Start.of(state, self.num_workers, self.persistent_workers)
        self._pass = _Pass(self._batches, iter(self._loader), self.num_workers, self._batches.start)
        if self.num_workers > 0:
            self._batches.start = None
        return self._pass

    def close(self) -> None:
        """End all workers."""
        iterator = self._loader._iterator
        self._loader._iterator = None
        if iterator is not None:
            shut_down(iterator)


class _Start(NamedTuple):
    """A position to begin at."""

    states: Mapping[int, Mapping[str, Any]]
    """By worker; 0 is also the main process."""
    last_worker: int
    """The worker whose batch was handed out last."""
    finished: bool
    """Whether the epoch was over: the position is where the next one begins."""

    @classmethod
    def of(cls, state: Mapping[str, Any], num_workers: int, persistent_workers: bool) -> "_Start | None":
        finished = bool(state.get("_iterator_finished", False))
        if num_workers == 0:
            return cls({0: state}, 0, finished) if "dataset_state" in state else None
        snapshot = state.get("_snapshot", {})
        workers = snapshot.get("_worker_snapshots", {})
        states = {number: workers[_key(number)] for number in range(num_workers) if _key(number) in workers}
        if len(states) < num_workers or (finished and not persistent_workers):
            # New workers begin an epoch with the dataset of this process, which they never change.
            return None
        return cls(states, snapshot.get("_last_yielded_worker_id", num_workers - 1), finished)


class _Note(NamedTuple):
    """Comes from a worker beside each batch, and sometimes alone."""

    worker: int
    state: dict[str, Any]
    has_batch: bool


class _Opaque:
    """Keeps a note from being pinned in memory as a batch is."""

    def __init__(self, note: _Note) -> None:
        self.note = note


class _Batches(IterableDataset[Any]):
    """The batches of a stream in one process; in a worker each with a note."""

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
        # The state of the dataset may reach from one epoch into the next; that of an iterator does not.
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
        # The state at the beginning, in case a checkpoint is saved before the first batch of this worker.
        yield None, self._note(number)
        if start is not None and not start.finished and number <= start.last_worker:
            # Workers take turns from the first one on, and this one has had its turn in the present round.
            yield None, self._note(number)
        for batch in self._in_order():
            yield batch, self._note(number, True)
        # An end that was found without a batch is a part of the position, too.
        yield None, self._note(number)

    def _note(self, number: int, has_batch: bool = False) -> _Opaque:
        return _Opaque(_Note(number, self.state_dict(), has_batch))


class _Pass(Iterator[Any]):
    """An epoch of a stream, or the rest of one."""

    def __init__(self, batches: _Batches, iterator: Iterator[Any], num_workers: int, start: _Start | None) -> None:
        self._batches = batches
        self._iterator = iterator
        self._num_workers = num_workers
        # Until the workers report, which all do before the first batch, the position is the one they begin at.
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
    return batch


def _key(worker: int) -> str:
    return f"worker_{worker}"
