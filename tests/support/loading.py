"""Datasets for tests of the loaders, and loops that read them with and without an interruption."""

import io
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from forgather.ml.checkpoint.encoding.codec import decode_state, encode_state
from forgather.ml.trainer.loading.builders import ResumableLoader, build_train_loader

NUM_EPOCHS = 3
WORKERS: list[dict[str, Any]] = [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]
WORKER_IDS = ["main", "workers", "persistent"]
# Few tests need both kinds of workers in a quick run; persistent workers cover most of the other kind.
PERSISTENT = [WORKERS[2]]

Batches = list[tuple[int, Any]]
Build = Callable[[], ResumableLoader]


def worker_id(options: dict[str, Any]) -> str:
    return WORKER_IDS[WORKERS.index(options)]


class Numbers(Dataset[int]):
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> int:
        return index


class Noisy(Numbers):
    """Dataset that draws from all random generators for every sample."""

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), float(np.random.rand()), float(torch.rand(()))


class OfEpoch(Numbers):
    """Dataset with samples numbered from 1000 times the epoch."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> int:
        return 1000 * self.epoch + index


class Stream(IterableDataset[Any]):
    """Iterable dataset without state and length; numbers start at 1000 times the epoch and are split among workers."""

    epoch = 0

    def __init__(self, num_samples: int, noisy: bool = False) -> None:
        self.num_samples = num_samples
        self.noisy = noisy

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        offset, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return (self.sample(number) for number in range(offset, self.num_samples, step))

    def sample(self, number: int) -> Any:
        sample = 1000 * self.epoch + number
        return (sample, random.random(), float(np.random.rand()), float(torch.rand(()))) if self.noisy else sample


class StatefulStream(Stream):
    """Stream that keeps its position, and restarts after its end."""

    position = 0

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        offset, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        while self.position * step + offset < self.num_samples:
            self.position += 1
            yield self.sample((self.position - 1) * step + offset)
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.num_samples


class OwnLoader:
    """Plain object that yields batches."""

    def __init__(self, num_batches: int) -> None:
        self.num_batches = num_batches

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(self.num_batches):
            yield [number]


def as_list(samples: list[Any]) -> list[Any]:
    return list(samples)


def train_loader(dataset: Any, **options: Any) -> ResumableLoader:
    return build_train_loader(dataset, **{"batch_size": 3, "seed": 11, "collate_fn": as_list, **options})


def stored(state: Any) -> Any:
    """Return the state after a round trip through a checkpoint file."""
    buffer = io.BytesIO()
    torch.save(encode_state(state), buffer)
    buffer.seek(0)
    return decode_state(torch.load(buffer, weights_only=True))


def run(loader: ResumableLoader, first_epoch: int = 0, num_epochs: int = NUM_EPOCHS) -> Iterator[tuple[int, Any]]:
    for epoch in range(first_epoch, num_epochs):
        loader.set_epoch(epoch)
        for batch in loader:
            yield epoch, batch


def straight(build: Build) -> Batches:
    loader = build()
    batches = list(run(loader))
    loader.close()
    return batches


def interrupted(build: Build, position: int) -> Batches:
    """Stop after `position` batches, then resume with a new loader from the stored state."""
    loader = build()
    before = list(itertools.islice(run(loader), position))
    state = stored(loader.state_dict())
    loader.close()
    resumed = build()
    resumed.load_state_dict(state)
    after = list(run(resumed, first_epoch=before[-1][0] if before else 0))
    resumed.close()
    return before + after


def between_epochs(build: Build) -> Batches:
    """Stop between the first and the second epoch, then resume with a new loader."""
    loader = build()
    first = list(run(loader, num_epochs=1))
    state = stored(loader.state_dict())
    loader.close()
    resumed = build()
    resumed.load_state_dict(state)
    assert list(resumed) == [], "the epoch is over"
    rest = list(run(resumed, first_epoch=1))
    resumed.close()
    return first + rest


def samples_of(batches: Batches) -> list[Any]:
    return [sample for _, batch in batches for sample in batch]
