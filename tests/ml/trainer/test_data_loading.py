"""A resumed run sees the batches, and draws the random numbers, that an uninterrupted one would have."""

import io
import itertools
import multiprocessing
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler as StatefulRandomSampler
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from forgather.ml.checkpoint.codec import decode_state, encode_state
from forgather.ml.checkpoint.rng import RNGState
from forgather.ml.trainer.data_loading import ResumableLoader, build_eval_loader, build_train_loader
from forgather.ml.trainer.data_order import host_generators, seed_generators

NUM_EPOCHS = 3
WORKERS = [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]
WORKER_IDS = ["main", "workers", "persistent"]

Batches = list[tuple[int, Any]]
Build = Callable[[], ResumableLoader]


class Numbers(Dataset[int]):
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> int:
        return index


class Noisy(Numbers):
    """Draws from every generator for every sample."""

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), float(np.random.rand()), float(torch.rand(()))


class OfEpoch(Numbers):
    """Counts its samples from the epoch's thousand."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> int:
        return 1000 * self.epoch + index


class Stream(IterableDataset[Any]):
    """Numbers, shared out among workers, from the epoch's thousand; no state, no length."""

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
    """Keeps its position, and begins anew at its end."""

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


class CarryingStream(IterableDataset[int]):
    """Each epoch goes on with a generator of its own, which only the state keeps."""

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
    """Takes a loaded position as the start of its next pass, also when that lies at the end."""

    start = 0

    def __iter__(self) -> Iterator[int]:
        start, self.start = self.start, 0
        for sample in range(start, self.num_samples):
            self.position = sample + 1
            yield 1000 * self.epoch + sample

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["position"]


def as_list(samples: list[Any]) -> list[Any]:
    return list(samples)


def train_loader(dataset: Any, **options: Any) -> ResumableLoader:
    return build_train_loader(dataset, **{"batch_size": 3, "seed": 11, "collate_fn": as_list, **options})


def stored(state: Any) -> Any:
    """The state as it comes back from a checkpoint."""
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
    """Stops after so many batches, and goes on with another loader from the stored state."""
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
    """Stops when the first epoch has ended and the second has not begun, and goes on with another loader."""
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


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_resume_at_every_position(shuffle: bool, batch_size: int) -> None:
    def build() -> ResumableLoader:
        return train_loader(Numbers(10), batch_size=batch_size, shuffle=shuffle)

    expected = straight(build)
    assert sorted(samples_of(expected)) == sorted(list(range(10)) * NUM_EPOCHS)
    for position in range(len(expected) + 1):
        assert interrupted(build, position) == expected
    assert between_epochs(build) == expected


@pytest.mark.parametrize("options", WORKERS[1:], ids=WORKER_IDS[1:])
@pytest.mark.parametrize("position", [2, 4, 5])
def test_resume_with_workers(options: dict[str, Any], position: int) -> None:
    def build() -> ResumableLoader:
        return train_loader(Numbers(10), **options)

    assert straight(build) == straight(lambda: train_loader(Numbers(10))), "workers change nothing"
    assert interrupted(build, position) == straight(build)


def test_epochs_have_different_orders() -> None:
    epochs = [
        [batch for _, batch in group]
        for _, group in itertools.groupby(straight(lambda: train_loader(Numbers(20))), lambda item: item[0])
    ]
    assert len(epochs) == NUM_EPOCHS and epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("new_size", [1, 2, 7])
def test_another_batch_size_neither_repeats_nor_skips(new_size: int) -> None:
    loader = train_loader(Numbers(20), batch_size=3)
    before = list(itertools.islice(run(loader), 9))
    resumed = train_loader(Numbers(20), batch_size=new_size)
    resumed.load_state_dict(loader.state_dict())
    after = list(run(resumed, first_epoch=1))
    assert samples_of(before + after) == samples_of(straight(lambda: train_loader(Numbers(20))))
    assert resumed.num_batches == -(-20 // new_size)


def test_a_checkpoint_brings_its_seed() -> None:
    def build(seed: int) -> ResumableLoader:
        return train_loader(Numbers(10), seed=seed)

    seeds = iter([1, 2])
    assert interrupted(lambda: build(next(seeds)), 3) == straight(lambda: build(1))


def test_the_end_of_an_epoch_stays_the_end() -> None:
    loader = train_loader(Numbers(7), drop_last=True)
    assert len(list(loader)) == 2 == loader.num_batches
    assert list(loader) == []
    loader.set_epoch(0)
    assert list(loader) == []
    loader.set_epoch(1)
    assert len(list(loader)) == 2


@pytest.mark.parametrize("options", WORKERS, ids=WORKER_IDS)
@pytest.mark.parametrize("dataset", [Numbers(12), Stream(12), StatefulStream(12)], ids=["map", "stream", "stateful"])
def test_leaving_and_coming_back_goes_on(dataset: Any, options: dict[str, Any]) -> None:
    expected = list(train_loader(dataset, **options))
    loader = train_loader(dataset, **options)
    seen = list(itertools.islice(loader, 1))
    seen += itertools.islice(loader, 1)
    loader.close()
    seen += loader
    loader.close()
    assert seen == expected


@pytest.mark.parametrize("options", WORKERS, ids=WORKER_IDS)
@pytest.mark.parametrize("dataset", [OfEpoch(12), StatefulStream(12)], ids=["map", "stream"])
def test_an_epoch_can_be_cut_short(dataset: Any, options: dict[str, Any]) -> None:
    loader = train_loader(dataset, shuffle=False, **options)
    list(itertools.islice(loader, 1))
    if isinstance(dataset, StatefulStream):
        dataset.position = 0  # in the main process nothing else resets it before the end
    loader.set_epoch(1)
    assert sorted(itertools.chain(*loader)) == list(range(1000, 1012))
    loader.close()


def test_the_position_counts_what_was_handed_out_not_what_was_prefetched() -> None:
    loader = train_loader(Numbers(30), num_workers=2, prefetch_factor=3)
    for _ in itertools.islice(loader, 4):
        pass
    assert loader.state_dict() == {"seed": 11, "epoch": 0, "index": 12, "num_samples": 30}
    loader.close()


@pytest.mark.parametrize("dataset", [Numbers(30), StatefulStream(30)], ids=["map", "stream"])
@pytest.mark.parametrize("options", WORKERS[1:], ids=WORKER_IDS[1:])
def test_leaving_early_leaves_no_worker(dataset: Any, options: dict[str, Any]) -> None:
    loader = train_loader(dataset, **options)
    for _ in loader:
        assert len(multiprocessing.active_children()) == 2
        break
    loader.close()
    loader.close()
    assert multiprocessing.active_children() == []


def test_the_end_of_an_epoch_ends_workers_that_are_not_to_persist() -> None:
    loader = train_loader(Numbers(6), num_workers=2)
    list(loader)
    assert multiprocessing.active_children() == []


def worker_ids_and_samples(samples: list[int]) -> tuple[int | None, list[int]]:
    return multiprocessing.current_process().pid, samples


def test_persistent_workers_live_on_and_learn_the_epoch() -> None:
    loader = train_loader(OfEpoch(12), num_workers=2, persistent_workers=True, collate_fn=worker_ids_and_samples)
    batches = list(run(loader))
    loader.close()
    assert len({pid for _, (pid, _) in batches}) == 2
    assert all(sample // 1000 == epoch for epoch, (_, samples) in batches for sample in samples)


@pytest.mark.parametrize("options", WORKERS, ids=WORKER_IDS)
def test_streams_learn_the_epoch(options: dict[str, Any]) -> None:
    loader = train_loader(Stream(12), **options)
    batches = list(run(loader))
    loader.close()
    assert sorted(samples_of(batches)) == [1000 * epoch + sample for epoch in range(NUM_EPOCHS) for sample in range(12)]


def test_datasets_are_not_told_the_epoch_when_that_is_off() -> None:
    dataset = OfEpoch(4)
    list(run(train_loader(dataset, set_dataset_epoch=False)))
    assert dataset.epoch == -1


class Growing(OfEpoch):
    def __len__(self) -> int:
        return 4 + 2 * self.epoch


def test_a_length_that_depends_on_the_epoch() -> None:
    def build() -> ResumableLoader:
        return train_loader(Growing(0))

    expected = straight(build)
    assert len(samples_of(expected)) == 4 + 6 + 8
    assert interrupted(build, 3) == expected


def noise(samples: list[Any]) -> tuple[list[Any], float]:
    return samples, random.random()


@pytest.mark.parametrize("options", WORKERS[1:], ids=WORKER_IDS[1:])
@pytest.mark.parametrize(
    "dataset", [Noisy, lambda n: Stream(n, True), lambda n: StatefulStream(n, True)], ids=["map", "stream", "stateful"]
)
def test_workers_draw_the_same_random_numbers_after_a_resume(dataset: Any, options: dict[str, Any]) -> None:
    def build() -> ResumableLoader:
        return train_loader(dataset(20), collate_fn=noise, **options)

    expected = straight(build)
    assert len({samples[0][1] for _, (samples, _) in expected}) == len(expected), "every batch draws its own"
    for position in (3, len(expected) // NUM_EPOCHS):
        assert interrupted(build, position) == expected


def test_in_the_main_process_datasets_draw_from_the_global_generators() -> None:
    seed_generators(3)
    batch = next(iter(train_loader(Noisy(4), shuffle=False)))
    seed_generators(3)
    assert batch == [Noisy(4)[index] for index in range(3)]


def generator_states() -> list[Any]:
    return [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()]


DATASETS = {
    "map": lambda: Numbers(12),
    "stream": lambda: Stream(12),
    "stateful stream": lambda: StatefulStream(12),
}


@pytest.mark.parametrize("options", WORKERS, ids=WORKER_IDS)
@pytest.mark.parametrize("name", DATASETS)
def test_loading_leaves_the_global_generators_alone(name: str, options: dict[str, Any]) -> None:
    before = generator_states()
    assert interrupted(lambda: train_loader(DATASETS[name](), **options), 5)
    list(
        build_eval_loader(DATASETS[name](), batch_size=4, collate_fn=as_list, num_workers=options.get("num_workers", 0))
    )
    assert generator_states() == before


READY = {
    "shuffled loader": lambda: DataLoader(Noisy(12), batch_size=3, shuffle=True, collate_fn=as_list),
    "stateful loader": lambda: StatefulDataLoader(Noisy(12), batch_size=3, shuffle=True, collate_fn=as_list),
    "noisy stream": lambda: Stream(12, True),
    "noisy stateful stream": lambda: StatefulStream(12, True),
    "noisy map": lambda: Noisy(12),
}


@pytest.mark.parametrize("name", READY)
@pytest.mark.parametrize("position", [2, 4, 5, "between epochs"])
def test_resume_continues_the_global_generators_of_the_main_process(name: str, position: Any) -> None:
    """As the trainer does it: the generators of the checkpoint are restored, whatever was drawn since."""
    between = position == "between epochs"
    seed_generators(5)
    loader = train_loader(READY[name]())
    list(run(loader, num_epochs=1) if between else itertools.islice(run(loader), position))
    state, generators = stored(loader.state_dict()), host_generators()
    next_epoch = 1 if between else (position - 1) // 4
    expected = list(run(loader, first_epoch=next_epoch)), generator_states()

    seed_generators(5)
    # a loader may take its own seed from the global generator when it is made
    resumed = train_loader(READY[name]())
    seed_generators(6)
    resumed.load_state_dict(state)
    RNGState().load_state_dict(generators)
    assert (list(run(resumed, first_epoch=next_epoch)), generator_states()) == expected


@pytest.mark.parametrize("options", WORKERS, ids=WORKER_IDS)
@pytest.mark.parametrize("dataset", [Stream, StatefulStream], ids=["stateless", "stateful"])
@pytest.mark.parametrize("num_samples", [12, 13])
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


def test_a_stream_that_carries_state_from_epoch_to_epoch() -> None:
    def build() -> ResumableLoader:
        return train_loader(CarryingStream(), batch_size=2)

    expected = straight(build)
    for position in range(len(expected) + 1):
        assert interrupted(build, position) == expected
    assert between_epochs(build) == expected


@pytest.mark.parametrize("num_samples", [6, 7])
def test_an_epoch_is_not_lost_to_a_position_at_the_end_of_the_one_before(num_samples: int) -> None:
    def build() -> ResumableLoader:
        return train_loader(StartingStream(num_samples))

    assert between_epochs(build) == straight(build)


def test_an_epoch_that_is_over_is_not_read_again() -> None:
    loader = train_loader(Stream(12))
    list(loader)
    assert loader.state_dict()["finished"] and loader.state_dict()["loader"] is None


def test_another_batch_size_with_a_stateful_stream() -> None:
    loader = train_loader(StatefulStream(12), batch_size=3)
    before = list(itertools.islice(run(loader), 2))
    resumed = train_loader(StatefulStream(12), batch_size=4)
    resumed.load_state_dict(loader.state_dict())
    assert samples_of(before + list(run(resumed, num_epochs=1))) == list(range(12))


def test_reading_through_data_is_announced_once(caplog: pytest.LogCaptureFixture) -> None:
    loader = train_loader(Stream(12))
    next(iter(loader))
    state = loader.state_dict()
    for _ in range(2):
        loader.load_state_dict(state)
    announcements = [record for record in caplog.records if "reads through its data" in record.getMessage()]
    assert len(announcements) == 1 and "Stream" in announcements[0].getMessage()

    caplog.clear()
    stateful = train_loader(StatefulStream(12))
    next(iter(stateful))
    stateful.load_state_dict(stateful.state_dict())
    assert not caplog.records


@pytest.mark.parametrize(
    "option, argument", [("num_workers", "dataloader_num_workers"), ("batch_size", "per_device_train_batch_size")]
)
def test_what_a_stream_cannot_change_is_refused(option: str, argument: str) -> None:
    loader = train_loader(Stream(12))
    next(iter(loader))
    with pytest.raises(ValueError, match=rf"Stream.*{argument}=.*skip_checkpoint_components"):
        train_loader(Stream(12), **{option: 1}).load_state_dict(loader.state_dict())


def test_lengths() -> None:
    assert train_loader(Stream(12)).num_batches is None
    assert train_loader(SizedStream(13)).num_batches == 5
    assert train_loader(SizedStream(13), drop_last=True).num_batches == 4
    assert train_loader(iter([[1], [2]])).num_batches is None
    assert train_loader(DataLoader(Numbers(7), batch_size=2)).num_batches == 4
    assert train_loader(DataLoader(Numbers(7), batch_size=2)).batch_size == 2


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


class OwnLoader:
    """Any object that yields batches."""

    def __init__(self, num_batches: int) -> None:
        self.num_batches = num_batches

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(self.num_batches):
            yield [number]


@pytest.mark.parametrize("name", READY_LOADERS)
@pytest.mark.parametrize("position", [0, 1, 3, 4, 5])
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


def test_samplers_of_ready_loaders_learn_the_epoch() -> None:
    loader = READY_LOADERS["plain"]()
    train_loader(loader).set_epoch(5)
    assert loader.sampler.epoch == 5
    train_loader(loader, set_dataset_epoch=False).set_epoch(6)
    assert loader.sampler.epoch == 5


def test_skipping_through_a_ready_loader_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    interrupted(lambda: train_loader(OwnLoader(4)), 3)
    assert "OwnLoader has no state_dict" in caplog.text and "3 batches" in caplog.text


def test_a_ready_loader_that_became_shorter_is_refused() -> None:
    loader = train_loader(OwnLoader(4))
    list(itertools.islice(loader, 3))
    shorter = train_loader(OwnLoader(2))
    shorter.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match=r"3 batches into the epoch.*skip_checkpoint_components"):
        next(iter(shorter))


def test_an_endless_iterator_is_not_ended_by_a_new_epoch() -> None:
    loader = train_loader(batch for batch in itertools.count())
    assert list(itertools.islice(loader, 2)) == [0, 1]
    loader.set_epoch(1)
    assert list(itertools.islice(loader, 2)) == [2, 3]


class Failing(Numbers):
    def __getitem__(self, index: int) -> int:
        if index == 4:
            raise KeyError("no such sample")
        return index


@pytest.mark.parametrize("options", WORKERS, ids=WORKER_IDS)
def test_a_failure_does_not_move_the_position(options: dict[str, Any]) -> None:
    loader = train_loader(Failing(12), shuffle=False, **options)
    for _ in range(2):
        with pytest.raises(KeyError, match="no such sample"):
            list(loader)
        assert loader.state_dict()["index"] == 3
        assert multiprocessing.active_children() == []


@pytest.mark.parametrize("dataset", [[], SizedStream(0), DataLoader(Numbers(0))], ids=["map", "stream", "loader"])
def test_empty_datasets_are_refused(dataset: Any) -> None:
    with pytest.raises(ValueError, match=r"(list|SizedStream|Numbers)\) is empty. Check"):
        train_loader(dataset)


@pytest.mark.parametrize("dataset", [Numbers(5), SizedStream(5)], ids=["map", "stream"])
def test_fewer_samples_than_the_batch_that_is_kept(dataset: Any) -> None:
    with pytest.raises(ValueError, match="5 samples, fewer than one batch of 8"):
        train_loader(dataset, batch_size=8, drop_last=True)


@pytest.mark.parametrize("build", [train_loader, build_eval_loader])
def test_batches_have_samples(build: Any) -> None:
    with pytest.raises(ValueError, match="batch_size=0"):
        build([1, 2], batch_size=0)


class Unsized(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    "dataset, message", [({"train": [1]}, r'dataset\["train"\]'), (3, "int cannot be used"), (Unsized(), "__len__")]
)
def test_other_things_are_refused(dataset: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train_loader(dataset)


def test_a_position_of_another_kind_of_data_is_refused() -> None:
    loaders = [train_loader(dataset) for dataset in (Numbers(4), Stream(4), OwnLoader(4))]
    for loader, other in itertools.permutations(loaders, 2):
        with pytest.raises(ValueError, match="another kind of training data"):
            loader.load_state_dict(other.state_dict())


@pytest.mark.parametrize("options", WORKERS, ids=WORKER_IDS)
def test_evaluation_goes_through_the_dataset_in_order(options: dict[str, Any]) -> None:
    loader: Any = build_eval_loader(Numbers(7), batch_size=3, collate_fn=as_list, **options)
    assert len(loader) == 3
    for _ in range(2):
        assert list(loader) == [[0, 1, 2], [3, 4, 5], [6]]


def test_every_evaluation_draws_the_same_in_workers() -> None:
    loader = build_eval_loader(Noisy(6), batch_size=3, collate_fn=as_list, num_workers=2, persistent_workers=True)
    assert list(loader) == list(loader)


def test_evaluation_of_other_kinds() -> None:
    unsized: Any = build_eval_loader(Stream(4), batch_size=3, collate_fn=as_list, drop_last=True)
    assert list(unsized) == [[0, 1, 2]]
    with pytest.raises(TypeError):
        len(unsized)
    ready = OwnLoader(2)
    assert build_eval_loader(ready, batch_size=3) is ready
    assert list(build_eval_loader([], batch_size=3)) == [], "one rank's share may be empty"


def test_default_collation() -> None:
    batch = next(iter(build_train_loader(Numbers(4), batch_size=2, seed=0, shuffle=False)))
    assert torch.equal(batch, torch.tensor([0, 1]))


def test_a_hugging_face_like_iterable_is_a_stream() -> None:
    own = type("IterableDataset", (), {"__iter__": lambda self: iter(range(4))})
    assert list(train_loader(type("Shards", (own,), {})())) == [[0, 1, 2], [3]]


class CountingStream(IterableDataset[Tensor]):
    """A stream that does not know its position."""

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        first, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return (torch.tensor(number) for number in range(first, 60, stride))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_stream_without_a_state_is_resumed_as_often_as_one_likes(num_workers: int) -> None:
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
