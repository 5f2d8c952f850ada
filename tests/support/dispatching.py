"""Dispatched data loaders for the ranks of a test, with the batches that the ranks received."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from forgather.ml.trainer.dataloader_dispatcher import DataloaderDispatcher
from forgather.ml.trainer.loading.builders import build_train_loader
from forgather.ml.trainer.loading.empty_batch import EmptyBatch

NUM_SAMPLES = 42
BATCH_SIZE = 2

Taken = list[list[int] | str]


class Numbers:
    """Dataset of numbered samples that counts the reads in this process."""

    def __init__(self, num_samples: int = NUM_SAMPLES, seconds: float = 0.0) -> None:
        self.num_samples = num_samples
        self.num_reads = 0
        self.seconds = seconds
        self.fails_at: int | None = None

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(self.seconds)
        if index == self.fails_at:
            raise OSError(f"sample {index} is broken")
        self.num_reads += 1
        return {"labels": index}


def is_first() -> bool:
    return dist.get_rank() == 0


def mesh(*shape: int) -> Any:
    return init_device_mesh("cpu", shape or (dist.get_world_size(),))


def dispatched(loader: Any, **options: Any) -> DataloaderDispatcher:
    """Build a dispatcher with a loader on the first rank only; it prefetches even if reading is fast."""
    return DataloaderDispatcher(loader if is_first() else None, mesh(), "cpu", **{"slow_seconds": 0.0, **options})


def train_loader(dataset: Any, **options: Any) -> Any:
    return build_train_loader(dataset, batch_size=BATCH_SIZE, seed=5, **options)


def ready(num_batches: int) -> list[dict[str, Tensor]]:
    return [{"labels": torch.tensor([number])} for number in range(num_batches)]


def labels_of(batch: Any) -> list[int] | str:
    labels = batch["labels"].tolist()
    if isinstance(batch, EmptyBatch):
        assert set(labels) == {-100}
        return f"empty of {len(labels)}"
    assert type(batch) is dict
    return labels


def take(loader: Any, num_rounds: int | None = None) -> Taken:
    """Return the labels of one pass, or of its first `num_rounds` rounds."""
    taken: Taken = []
    for batch in loader if num_rounds != 0 else ():
        taken.append(labels_of(batch))
        if len(taken) == num_rounds:
            break
    return taken


def in_order(taken_by_ranks: list[Taken]) -> list[int]:
    """Return the samples of all ranks in batch order, without empty batches."""
    batches = [batch for one_round in zip(*taken_by_ranks, strict=True) for batch in one_round]
    return [number for batch in batches if not isinstance(batch, str) for number in batch]


def expected_order() -> list[int]:
    return [number for batch in train_loader(Numbers()) for number in batch["labels"].tolist()]


def until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()
