"""Length estimates of datasets, synchronised from real dataloader workers."""

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from forgather.ml.datasets import sync_dataset_state_from_dataloader


class Estimating(IterableDataset[int]):
    """Dataset that estimates its length while it is read; each worker reports its own number."""

    def __init__(self) -> None:
        self.estimate = 0
        self.position = 0
        self.heard: list[int] = []

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        self.estimate = 100 + (worker.id if worker else 0)
        for self.position in range(4):
            yield self.position

    def state_dict(self) -> dict[str, Any]:
        return {"estimate": self.estimate, "position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError("would move this copy of the dataset")

    def sync_length_estimate(self, state: dict[str, Any]) -> None:
        self.heard.append(state["estimate"])


class OwnIterator(Estimating):
    def __iter__(self) -> Iterator[int]:
        self.estimate = 100
        return self

    def __next__(self) -> int:
        if self.position == 4:
            raise StopIteration
        self.position += 1
        return self.position


class Silent(Estimating):
    sync_length_estimate = None  # type: ignore[assignment]


def test_every_worker_reports_within_and_at_the_end_of_an_epoch() -> None:
    dataset = Estimating()
    loader = StatefulDataLoader(dataset, batch_size=2, num_workers=2)
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    sync_dataset_state_from_dataloader(loader)
    assert dataset.heard == [100, 101]
    list(batches)
    sync_dataset_state_from_dataloader(loader)
    assert dataset.heard == [100, 101, 100, 101]


def test_dataset_that_is_its_own_iterator_reports_too() -> None:
    dataset = OwnIterator()
    loader = StatefulDataLoader(dataset, batch_size=2, num_workers=1)
    next(iter(loader))
    sync_dataset_state_from_dataloader(loader)
    assert dataset.heard == [100]


def test_synchronisation_before_the_first_batch_starts_no_workers() -> None:
    dataset = Estimating()
    loader = StatefulDataLoader(dataset, batch_size=2, num_workers=1)
    sync_dataset_state_from_dataloader(loader)
    assert dataset.heard == []
    assert loader._iterator is None


@pytest.mark.parametrize(
    "loader",
    [
        StatefulDataLoader(Estimating(), batch_size=2),
        StatefulDataLoader(Silent(), batch_size=2),
        DataLoader(Estimating(), batch_size=2),
        [1, 2, 3],
    ],
)
def test_other_loaders_are_ignored(loader: Any) -> None:
    list(loader)
    sync_dataset_state_from_dataloader(loader)
    assert not getattr(getattr(loader, "dataset", None), "heard", [])
