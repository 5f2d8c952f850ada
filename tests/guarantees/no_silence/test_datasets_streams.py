"""Streams of the package `datasets` resume exactly, also with a shuffle buffer, which their own state omits."""

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from forgather.ml.trainer.loading.builders import ResumableLoader
from tests.support.loading import WORKERS, as_list, between_epochs, interrupted, run, stored, straight, train_loader

datasets = pytest.importorskip("datasets", reason="needs the package datasets")


split_dataset_by_node = importlib.import_module("datasets.distributed").split_dataset_by_node


def numbers(parts: list[int]) -> Iterator[dict[str, int]]:
    for part in parts:
        for number in range(7):
            yield {"number": 100 * part + number}


def stream(kind: str, seed: int | None = 3) -> Any:
    made = datasets.IterableDataset.from_generator(numbers, gen_kwargs={"parts": [0, 1]})
    if kind == "plain":
        return made
    if kind == "shuffled, then mapped":
        return made.shuffle(seed=seed, buffer_size=5).map(lambda sample: sample).take(11)
    if kind == "interleaved":
        return datasets.interleave_datasets([made.shuffle(seed=seed, buffer_size=5), made])
    if kind == "of a table, shuffled":
        rows = [{"number": number, "unused": "text"} for number in range(14)]
        return datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=2).shuffle(seed=seed, buffer_size=5)
    if kind == "part of a rank":
        return split_dataset_by_node(made.shuffle(seed=seed, buffer_size=5), rank=1, world_size=2)
    if kind == "mapped in batches, then shuffled":
        return made.map(lambda batch: batch, batched=True, batch_size=3).shuffle(seed=seed, buffer_size=5)
    return made.shuffle(seed=seed, buffer_size=5)


KINDS = ["plain", "shuffled", "shuffled, then mapped", "interleaved", "of a table, shuffled", "part of a rank"]
KINDS += ["mapped in batches, then shuffled"]


def samples(batch: list[dict[str, int]]) -> list[int]:
    return [sample["number"] for sample in batch]


def loader_of(kind: str, **options: Any) -> ResumableLoader:
    return train_loader(stream(kind), collate_fn=samples, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_stream_resumes_exactly(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    def build() -> ResumableLoader:
        return loader_of(kind)

    expected = straight(build)
    epochs = [[number for at, batch in expected for number in batch if at == epoch] for epoch in (0, 1)]
    assert kind == "plain" or epochs[0] != epochs[1], "each epoch has its own order"
    for position in (1, 3, 4):
        assert len(expected) > 5
        assert interrupted(build, position) == expected
    assert between_epochs(build) == expected
    said = [record.getMessage() for record in caplog.records if "reads its data again" in record.getMessage()]
    assert bool(said) == (kind != "plain")
    assert all("has a shuffle buffer, which its state does not contain" in one for one in said)


def test_stream_with_workers_resumes_exactly() -> None:
    def build() -> ResumableLoader:
        return loader_of("shuffled", **WORKERS[1])

    assert interrupted(build, 3) == straight(build)


@pytest.mark.parametrize("position", [3, 5], ids=["within the epoch", "at its end"])
def test_older_position_with_dataset_state_resumes(position: int) -> None:
    """Earlier versions saved the dataset state for streams that are now read again on resume."""
    expected = straight(lambda: loader_of("shuffled"))
    loader = loader_of("shuffled")
    batches = run(loader)
    before = [next(batches) for _ in range(position)]
    if position == 5:
        assert list(loader) == []
    state = stored(loader.state_dict())
    loader.close()
    of_dataset = {
        "dataset_state": {"examples_iterable": {}, "epoch": 0},
        "fetcher_state": None,
        "_num_yielded": position,
    }
    resumed = loader_of("shuffled")
    resumed.load_state_dict({**state, "loader": {**(state["loader"] or {}), **of_dataset}})
    assert before + list(run(resumed, first_epoch=0 if position == 3 else 1)) == expected


def test_shuffle_without_a_seed_warns_at_construction(caplog: pytest.LogCaptureFixture) -> None:
    for seed in (3, 0, 2**63):
        train_loader(stream("shuffled", seed), collate_fn=samples)
    assert caplog.text == ""
    for dataset in (stream("shuffled", None), DataLoader(stream("interleaved", None), batch_size=2)):
        caplog.clear()
        train_loader(dataset, collate_fn=samples)
        assert (
            "shuffled without a seed" in caplog.text
            and "Pass a seed to shuffle() or interleave_datasets()" in caplog.text
        )


def test_stateful_dataloader_that_loses_samples_warns_at_construction(caplog: pytest.LogCaptureFixture) -> None:
    for ready in (DataLoader(stream("shuffled"), batch_size=2), StatefulDataLoader(stream("plain"), batch_size=2)):
        train_loader(ready, collate_fn=as_list)
    assert caplog.text == ""
    train_loader(StatefulDataLoader(stream("shuffled"), batch_size=2))
    assert "StatefulDataLoader saves the state of a stream with a shuffle buffer" in caplog.text
    assert "Pass the dataset itself to the trainer" in caplog.text
