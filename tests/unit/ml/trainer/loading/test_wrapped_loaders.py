"""Streams and ready loaders: resumed from their own state, or by skipping batches."""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler as StatefulRandomSampler
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.trainer.loading.builders import ResumableLoader, build_train_loader
from forgather.ml.trainer.loading.data_order import Part
from tests.support.loading import (
    NUM_EPOCHS,
    WORKER_IDS,
    WORKERS,
    Numbers,
    OwnLoader,
    StatefulStream,
    Stream,
    as_list,
    between_epochs,
    interrupted,
    run,
    samples_of,
    stored,
    straight,
    train_loader,
)
from tests.support.sampling import sampled
from tests.support.wrong_values import COUNT, FLAG, INTEGER, assert_refuses, with_none


class CarryingStream(IterableDataset[int]):
    """Stream that continues its own generator in each epoch; only its state keeps the generator."""

    def __init__(self) -> None:
        self.generator = random.Random(0)
        self.rest: list[int] | None = None

    def __iter__(self) -> Iterator[int]:
        if self.rest is None:
            self.rest = self.generator.sample(range(6), 6)
        while self.rest:
            yield self.rest.pop()
        self.rest = None

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.getstate(), "rest": self.rest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.setstate(state["generator"])
        self.rest = state["rest"]


class StartingStream(StatefulStream):
    """Stream that starts its next pass at a loaded position, even at the end."""

    start = 0

    def __iter__(self) -> Iterator[int]:
        start, self.start = self.start, 0
        for sample in range(start, self.num_samples):
            self.position = sample + 1
            yield 1000 * self.epoch + sample

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["position"]


@pytest.mark.parametrize("options", WORKERS, ids=WORKER_IDS)
def test_streams_receive_the_epoch(options: dict[str, Any]) -> None:
    loader = train_loader(Stream(12), **options)
    batches = list(run(loader))
    loader.close()
    assert sorted(samples_of(batches)) == [1000 * epoch + sample for epoch in range(NUM_EPOCHS) for sample in range(12)]


@pytest.mark.parametrize("options", WORKERS, ids=WORKER_IDS)
@pytest.mark.parametrize(
    ("dataset", "num_samples"),
    sampled([(one, number) for one in (Stream, StatefulStream) for number in (12, 13)], [(StatefulStream, 13)]),
)
def test_streams_resume(dataset: Any, options: dict[str, Any], num_samples: int) -> None:
    def build() -> ResumableLoader:
        return train_loader(dataset(num_samples), **options)

    expected = straight(build)
    assert sorted(samples_of(expected)) == [1000 * e + n for e in range(NUM_EPOCHS) for n in range(num_samples)]
    num_batches = len(expected) // NUM_EPOCHS
    positions = range(len(expected) + 1) if not options else [1, num_batches, num_batches + 2]
    for position in positions:
        assert interrupted(build, position) == expected
    assert between_epochs(build) == expected


def test_stream_with_state_across_epochs_resumes() -> None:
    def build() -> ResumableLoader:
        return train_loader(CarryingStream(), batch_size=2)

    expected = straight(build)
    for position in range(len(expected) + 1):
        assert interrupted(build, position) == expected
    assert between_epochs(build) == expected


@pytest.mark.parametrize("num_samples", [6, 7])
def test_position_at_the_end_of_an_epoch_does_not_lose_the_next_one(num_samples: int) -> None:
    def build() -> ResumableLoader:
        return train_loader(StartingStream(num_samples))

    assert between_epochs(build) == straight(build)


def test_finished_epoch_is_not_read_again() -> None:
    loader = train_loader(Stream(12))
    list(loader)
    assert loader.state_dict()["finished"] and loader.state_dict()["loader"] is None


def test_stateful_stream_resumes_with_another_batch_size() -> None:
    loader = train_loader(StatefulStream(12), batch_size=3)
    before = list(itertools.islice(run(loader), 2))
    resumed = train_loader(StatefulStream(12), batch_size=4)
    resumed.load_state_dict(loader.state_dict())
    assert samples_of(before + list(run(resumed, num_epochs=1))) == list(range(12))


def test_skipping_samples_of_a_stream_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    loader = train_loader(Stream(12))
    next(iter(loader))
    state = loader.state_dict()
    for _ in range(2):
        loader.load_state_dict(state)
    announcements = [record for record in caplog.records if "reads its data again" in record.getMessage()]
    assert len(announcements) == 1 and "Stream" in announcements[0].getMessage()

    caplog.clear()
    stateful = train_loader(StatefulStream(12))
    next(iter(stateful))
    stateful.load_state_dict(stateful.state_dict())
    assert not caplog.records


@pytest.mark.parametrize(
    "option, argument", [("num_workers", "dataloader_num_workers"), ("batch_size", "per_device_train_batch_size")]
)
def test_changed_setting_of_a_stream_is_rejected(option: str, argument: str) -> None:
    loader = train_loader(Stream(12))
    next(iter(loader))
    with pytest.raises(ValueError, match=rf"Stream.*{argument}=.*skip_checkpoint_components"):
        train_loader(Stream(12), **{option: 1}).load_state_dict(loader.state_dict())


READY_LOADERS: dict[str, Callable[[], Any]] = {
    "stateful": lambda: StatefulDataLoader(
        Numbers(10),
        batch_size=3,
        sampler=StatefulRandomSampler(Numbers(10), generator=torch.Generator().manual_seed(1)),
        collate_fn=as_list,
    ),
    "stateful with workers": lambda: StatefulDataLoader(Numbers(10), batch_size=3, num_workers=2, collate_fn=as_list),
    "stateful sampler": lambda: StatefulDataLoader(
        Numbers(10),
        batch_size=3,
        sampler=StatefulDistributedSampler(Numbers(10), num_replicas=1, rank=0),
        collate_fn=as_list,
    ),
    "plain": lambda: DataLoader(
        Numbers(10), batch_size=3, sampler=DistributedSampler(Numbers(10), num_replicas=1, rank=0), collate_fn=as_list
    ),
    "plain with workers": lambda: DataLoader(Numbers(10), batch_size=3, num_workers=2, collate_fn=as_list),
    "own": lambda: OwnLoader(4),
}


@pytest.mark.parametrize("name", READY_LOADERS)
@pytest.mark.parametrize("position", sampled([0, 1, 3, 4, 5], [4]))
def test_ready_loaders_resume(name: str, position: int) -> None:
    def build() -> ResumableLoader:
        return train_loader(READY_LOADERS[name]())

    expected = straight(build)
    assert len(expected) == 4 * NUM_EPOCHS
    assert interrupted(build, position) == expected


@pytest.mark.parametrize("name", READY_LOADERS)
def test_ready_loaders_resume_between_epochs(name: str) -> None:
    def build() -> ResumableLoader:
        return train_loader(READY_LOADERS[name]())

    assert between_epochs(build) == straight(build)


def test_samplers_of_ready_loaders_receive_the_epoch() -> None:
    loader = READY_LOADERS["plain"]()
    train_loader(loader).set_epoch(5)
    assert loader.sampler.epoch == 5
    train_loader(loader, set_dataset_epoch=False).set_epoch(6)
    assert loader.sampler.epoch == 5


def test_skipping_batches_of_a_ready_loader_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    interrupted(lambda: train_loader(OwnLoader(4)), 3)
    assert "OwnLoader has no state_dict" in caplog.text and "3 batches" in caplog.text


def test_shortened_ready_loader_is_rejected() -> None:
    loader = train_loader(OwnLoader(4))
    list(itertools.islice(loader, 3))
    shorter = train_loader(OwnLoader(2))
    shorter.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match=r"3 batches into the epoch.*skip_checkpoint_components"):
        next(iter(shorter))


def test_endless_iterator_continues_in_a_new_epoch() -> None:
    loader = train_loader(batch for batch in itertools.count())
    assert list(itertools.islice(loader, 2)) == [0, 1]
    loader.set_epoch(1)
    assert list(itertools.islice(loader, 2)) == [2, 3]


def test_hugging_face_like_iterable_is_a_stream() -> None:
    own = type("IterableDataset", (), {"__iter__": lambda self: iter(range(4))})
    assert list(train_loader(type("Shards", (own,), {})())) == [[0, 1, 2], [3]]


class CountingStream(IterableDataset[Tensor]):
    """Stream without a state."""

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        first, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return (torch.tensor(number) for number in range(first, 60, stride))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_stateless_stream_can_be_resumed_repeatedly(num_workers: int) -> None:
    def read(position: Any, num_batches: int) -> tuple[list[Any], Any]:
        loader = build_train_loader(
            CountingStream(), batch_size=2, seed=0, num_workers=num_workers, collate_fn=torch.stack
        )
        if position is not None:
            loader.load_state_dict(position)
        batches = [batch.tolist() for batch in itertools.islice(loader, num_batches)]
        position = loader.state_dict()
        loader.close()
        return batches, position

    whole, _ = read(None, 14)
    in_parts: list[Any] = []
    position = None
    for num_batches in (6, 4, 0, 4):
        batches, position = read(position, num_batches)
        in_parts += batches
    assert in_parts == whole


# --- positions that are none

NO_POSITION: dict[str, Any] = {
    "epoch": COUNT,
    "finished": FLAG,
    "generators": with_none(()),
    "part": (),
    "part.0": COUNT,
}
STREAM: dict[str, Any] = {
    **NO_POSITION,
    "seed": INTEGER,
    "num_batches_read": COUNT,
    "batch_size": COUNT,
    "num_workers": COUNT,
    "loader": with_none(["dict"]),
    "loader._num_yielded": COUNT,
    "loader.fetcher_state": with_none(["dict"]),
    "loader.fetcher_state.dataset_iter_state": with_none(()),
}
HOSTILE: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "counting": (lambda: OwnLoader(9), {**NO_POSITION, "num_batches_done": COUNT}),
    "stateful": (lambda: StatefulDataLoader(Numbers(9), batch_size=2, collate_fn=as_list), NO_POSITION),
    "stream": (lambda: StatefulStream(20), STREAM),
    "numbers": (lambda: Numbers(20), {"seed": INTEGER, "epoch": COUNT, "index": COUNT}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_invalid_position_is_rejected_and_changes_nothing(name: str) -> None:
    make, accepted = HOSTILE[name]
    loader = train_loader(make())
    list(itertools.islice(run(loader), 2))
    state = stored(loader.state_dict())
    loader.close()
    resumed = train_loader(make())
    assert_refuses(resumed, state, "dataset", accepted)
    resumed.load_state_dict(state)
    assert repr(stored(resumed.state_dict())) == repr(state)
    resumed.close()


def test_positions_of_workers_are_checked() -> None:
    loader = train_loader(StatefulStream(20), num_workers=2)
    list(itertools.islice(run(loader), 2))
    state = stored(loader.state_dict())
    loader.close()
    base = "loader._snapshot"
    workers = f"{base}._worker_snapshots"
    accepted: dict[str, Any] = {
        base: ["dict"],
        workers: ["dict"],
        f"{workers}.worker_0": ["dict"],
        f"{workers}.worker_1.fetcher_state.dataset_iter_state.num_drawn": COUNT,
        f"{workers}.worker_1.fetcher_state.dataset_iter_state.ended": FLAG,
    }
    assert_refuses(train_loader(StatefulStream(20), num_workers=2), state, "dataset", accepted)


@pytest.mark.parametrize("state", [None, [], "epoch", 3])
@pytest.mark.parametrize("name", HOSTILE)
def test_position_that_is_not_a_dict_is_rejected(name: str, state: Any) -> None:
    with pytest.raises(CheckpointLoadError, match="dataset in the checkpoint"):
        train_loader(HOSTILE[name][0]()).load_state_dict(state)


def test_position_from_before_parts_counts_as_all_data() -> None:
    loader = train_loader(OwnLoader(9))
    state = {key: value for key, value in loader.state_dict().items() if key != "part"}
    loader.load_state_dict({**state, "num_batches_done": 2})
    assert loader.state_dict()["num_batches_done"] == 2
    with pytest.raises(ValueError, match=r"part 0 of 1 .*part 1 of 2"):
        train_loader(OwnLoader(9), part=Part(1, 2)).check_state_dict(state)


@pytest.mark.parametrize("kind", ["python", "numpy", "torch"])
def test_generator_states_are_checked_before_they_are_set(kind: str) -> None:
    loader = train_loader(OwnLoader(9))
    next(iter(loader))
    state = stored(loader.state_dict())
    state["generators"][kind] = "text"
    with pytest.raises(CheckpointLoadError, match=rf'dataset\.generators .*{kind}.*components=\["dataset"\]'):
        loader.check_state_dict(state)


def test_accelerator_generator_states_are_ignored() -> None:
    loader = train_loader(OwnLoader(9))
    next(iter(loader))
    state = stored(loader.state_dict())
    state["generators"]["accelerator"] = {"type": "cuda", "states": "text"}
    loader.load_state_dict(state)
    assert sorted(loader.state_dict()["generators"]) == ["numpy", "python", "torch"]


class Growing(Numbers):
    """Dataset with another length in each epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.num_samples = 20 + epoch


def test_dataset_keeps_its_epoch_if_the_position_does_not_match() -> None:
    dataset = Growing(20)
    loader = train_loader(dataset)
    state = loader.state_dict()
    with pytest.raises(CheckpointLoadError, match="25 samples, but had 20"):
        loader.load_state_dict({**state, "epoch": 5})
    assert len(dataset) == 20 and loader.state_dict() == state
    loader.load_state_dict({**state, "epoch": 5, "num_samples": 25})
    assert len(dataset) == 25
