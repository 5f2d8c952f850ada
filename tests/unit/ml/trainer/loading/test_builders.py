"""Resumed training loaders: same batches and same random numbers as an uninterrupted run."""

import itertools
import multiprocessing
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from forgather.ml.checkpoint.state.rng import RNGState
from forgather.ml.trainer.loading.builders import ResumableLoader, build_eval_loader, build_train_loader
from forgather.ml.trainer.loading.data_errors import DataError
from forgather.ml.trainer.loading.random_numbers import host_generators
from forgather.ml.trainer.setup.seeding import seed_host_generators
from tests.support.loading import (
    NUM_EPOCHS,
    PERSISTENT,
    WORKER_IDS,
    WORKERS,
    Noisy,
    Numbers,
    OfEpoch,
    OwnLoader,
    SizedStream,
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
    worker_id,
)
from tests.support.sampling import sampled


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
@pytest.mark.parametrize("position", sampled([2, 4, 5], [4]))
def test_resume_with_workers(options: dict[str, Any], position: int) -> None:
    def build() -> ResumableLoader:
        return train_loader(Numbers(10), **options)

    assert straight(build) == straight(lambda: train_loader(Numbers(10))), "workers must not change the order"
    assert interrupted(build, position) == straight(build)


def test_epochs_have_different_orders() -> None:
    epochs = [
        [batch for _, batch in group]
        for _, group in itertools.groupby(straight(lambda: train_loader(Numbers(20))), lambda item: item[0])
    ]
    assert len(epochs) == NUM_EPOCHS and epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("new_size", [1, 2, 7])
def test_changed_batch_size_neither_repeats_nor_skips_samples(new_size: int) -> None:
    loader = train_loader(Numbers(20), batch_size=3)
    before = list(itertools.islice(run(loader), 9))
    resumed = train_loader(Numbers(20), batch_size=new_size)
    resumed.load_state_dict(loader.state_dict())
    after = list(run(resumed, first_epoch=1))
    assert samples_of(before + after) == samples_of(straight(lambda: train_loader(Numbers(20))))
    assert resumed.num_batches == -(-20 // new_size)


def test_checkpoint_seed_replaces_the_new_seed() -> None:
    def build(seed: int) -> ResumableLoader:
        return train_loader(Numbers(10), seed=seed)

    seeds = iter([1, 2])
    assert interrupted(lambda: build(next(seeds)), 3) == straight(lambda: build(1))


def test_finished_epoch_stays_finished() -> None:
    loader = train_loader(Numbers(7), drop_last=True)
    assert len(list(loader)) == 2 == loader.num_batches
    assert list(loader) == []
    loader.set_epoch(0)
    assert list(loader) == []
    loader.set_epoch(1)
    assert len(list(loader)) == 2


@pytest.mark.parametrize("options", sampled(WORKERS, [{}, *PERSISTENT]), ids=worker_id)
@pytest.mark.parametrize("dataset", [Numbers(12), Stream(12), StatefulStream(12)], ids=["map", "stream", "stateful"])
def test_left_iteration_continues_at_its_position(dataset: Any, options: dict[str, Any]) -> None:
    expected = list(train_loader(dataset, **options))
    loader = train_loader(dataset, **options)
    seen = list(itertools.islice(loader, 1))
    seen += itertools.islice(loader, 1)
    loader.close()
    seen += loader
    loader.close()
    assert seen == expected


@pytest.mark.parametrize("options", sampled(WORKERS, [{}, *PERSISTENT]), ids=worker_id)
@pytest.mark.parametrize("dataset", [OfEpoch(12), StatefulStream(12)], ids=["map", "stream"])
def test_epoch_can_be_cut_short(dataset: Any, options: dict[str, Any]) -> None:
    loader = train_loader(dataset, shuffle=False, **options)
    list(itertools.islice(loader, 1))
    if isinstance(dataset, StatefulStream):
        dataset.position = 0  # In the main process, nothing else resets it before the end.
    loader.set_epoch(1)
    assert sorted(itertools.chain(*loader)) == list(range(1000, 1012))
    loader.close()


def test_position_counts_delivered_batches_not_prefetched_ones() -> None:
    loader = train_loader(Numbers(30), num_workers=2, prefetch_factor=3)
    for _ in itertools.islice(loader, 4):
        pass
    assert loader.state_dict() == {"seed": 11, "epoch": 0, "index": 12, "num_samples": 30, "order_version": 2}
    loader.close()


@pytest.mark.parametrize("dataset", [Numbers(30), StatefulStream(30)], ids=["map", "stream"])
@pytest.mark.parametrize("options", WORKERS[1:], ids=WORKER_IDS[1:])
def test_breaking_out_of_a_loop_leaves_no_worker(dataset: Any, options: dict[str, Any]) -> None:
    loader = train_loader(dataset, **options)
    for _ in loader:
        assert len(multiprocessing.active_children()) == 2
        break
    loader.close()
    loader.close()
    assert multiprocessing.active_children() == []


def test_non_persistent_workers_exit_at_the_end_of_an_epoch() -> None:
    loader = train_loader(Numbers(6), num_workers=2)
    list(loader)
    assert multiprocessing.active_children() == []


def worker_ids_and_samples(samples: list[int]) -> tuple[int | None, list[int]]:
    return multiprocessing.current_process().pid, samples


def test_persistent_workers_survive_and_receive_the_epoch() -> None:
    loader = train_loader(OfEpoch(12), num_workers=2, persistent_workers=True, collate_fn=worker_ids_and_samples)
    batches = list(run(loader))
    loader.close()
    assert len({pid for _, (pid, _) in batches}) == 2
    assert all(sample // 1000 == epoch for epoch, (_, samples) in batches for sample in samples)


def test_set_dataset_epoch_false_keeps_the_epoch_from_datasets() -> None:
    dataset = OfEpoch(4)
    list(run(train_loader(dataset, set_dataset_epoch=False)))
    assert dataset.epoch == -1


class Growing(OfEpoch):
    def __len__(self) -> int:
        return 4 + 2 * self.epoch


def test_dataset_length_may_depend_on_the_epoch() -> None:
    def build() -> ResumableLoader:
        return train_loader(Growing(0))

    expected = straight(build)
    assert len(samples_of(expected)) == 4 + 6 + 8
    assert interrupted(build, 3) == expected


def noise(samples: list[Any]) -> tuple[list[Any], float]:
    return samples, random.random()


@pytest.mark.parametrize("options", sampled(WORKERS[1:], PERSISTENT), ids=worker_id)
@pytest.mark.parametrize(
    "dataset", [Noisy, lambda n: Stream(n, True), lambda n: StatefulStream(n, True)], ids=["map", "stream", "stateful"]
)
def test_workers_draw_the_same_random_numbers_after_a_resume(dataset: Any, options: dict[str, Any]) -> None:
    def build() -> ResumableLoader:
        return train_loader(dataset(20), collate_fn=noise, **options)

    expected = straight(build)
    assert len({samples[0][1] for _, (samples, _) in expected}) == len(expected), (
        "every batch should draw different noise"
    )
    for position in (3, len(expected) // NUM_EPOCHS):
        assert interrupted(build, position) == expected


def test_datasets_in_the_main_process_draw_from_the_global_generators() -> None:
    seed_host_generators(3)
    batch = next(iter(train_loader(Noisy(4), shuffle=False)))
    seed_host_generators(3)
    assert batch == [Noisy(4)[index] for index in range(3)]


def generator_states() -> list[Any]:
    return [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()]


DATASETS = {
    "map": lambda: Numbers(12),
    "stream": lambda: Stream(12),
    "stateful stream": lambda: StatefulStream(12),
}


@pytest.mark.parametrize("options", sampled(WORKERS, [{}, *PERSISTENT]), ids=worker_id)
@pytest.mark.parametrize("name", DATASETS)
def test_loading_does_not_change_the_global_generators(name: str, options: dict[str, Any]) -> None:
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
    """Like the trainer: the generators of the checkpoint are restored, regardless of later draws."""
    between = position == "between epochs"
    seed_host_generators(5)
    loader = train_loader(READY[name]())
    list(run(loader, num_epochs=1) if between else itertools.islice(run(loader), position))
    state, generators = stored(loader.state_dict()), host_generators()
    next_epoch = 1 if between else (position - 1) // 4
    expected = list(run(loader, first_epoch=next_epoch)), generator_states()

    seed_host_generators(5)
    # A loader may draw its seed from the global generator at construction.
    resumed = train_loader(READY[name]())
    seed_host_generators(6)
    resumed.load_state_dict(state)
    RNGState().load_state_dict(generators)
    assert (list(run(resumed, first_epoch=next_epoch)), generator_states()) == expected


def test_num_batches_of_each_kind_of_data() -> None:
    assert train_loader(Stream(12)).num_batches is None
    assert train_loader(SizedStream(13)).num_batches == 5
    assert train_loader(SizedStream(13), drop_last=True).num_batches == 4
    assert train_loader(iter([[1], [2]])).num_batches is None
    assert train_loader(DataLoader(Numbers(7), batch_size=2)).num_batches == 4
    assert train_loader(DataLoader(Numbers(7), batch_size=2)).batch_size == 2


class Failing(Numbers):
    def __getitem__(self, index: int) -> int:
        if index == 4:
            raise KeyError("no such sample")
        return index


@pytest.mark.parametrize("options", WORKERS, ids=WORKER_IDS)
def test_failure_does_not_move_the_position(options: dict[str, Any]) -> None:
    loader = train_loader(Failing(12), shuffle=False, **options)
    for _ in range(2):
        with pytest.raises(DataError, match=r"^Sample 4 of the dataset Failing .*KeyError: 'no such sample'"):
            list(loader)
        assert loader.state_dict()["index"] == 3
        assert multiprocessing.active_children() == []


@pytest.mark.parametrize("dataset", [[], SizedStream(0), DataLoader(Numbers(0))], ids=["map", "stream", "loader"])
def test_empty_datasets_are_rejected(dataset: Any) -> None:
    with pytest.raises(ValueError, match=r"(list|SizedStream|Numbers)\) is empty. Check"):
        train_loader(dataset)


@pytest.mark.parametrize("dataset", [Numbers(5), SizedStream(5)], ids=["map", "stream"])
def test_drop_last_with_fewer_samples_than_a_batch_is_rejected(dataset: Any) -> None:
    with pytest.raises(ValueError, match="5 samples, fewer than one batch of 8"):
        train_loader(dataset, batch_size=8, drop_last=True)


@pytest.mark.parametrize("build", [train_loader, build_eval_loader])
def test_batch_size_of_zero_is_rejected(build: Any) -> None:
    with pytest.raises(ValueError, match="batch_size=0"):
        build([1, 2], batch_size=0)


class Unsized(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    "dataset, message", [({"train": [1]}, r'dataset\["train"\]'), (3, "int cannot be used"), (Unsized(), "__len__")]
)
def test_unsupported_datasets_are_rejected(dataset: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train_loader(dataset)


def test_position_of_another_kind_of_data_is_rejected() -> None:
    loaders = [train_loader(dataset) for dataset in (Numbers(4), Stream(4), OwnLoader(4))]
    for loader, other in itertools.permutations(loaders, 2):
        with pytest.raises(ValueError, match="saved for another kind of dataset"):
            loader.load_state_dict(other.state_dict())


@pytest.mark.parametrize("options", WORKERS, ids=WORKER_IDS)
def test_evaluation_reads_the_dataset_in_order(options: dict[str, Any]) -> None:
    loader: Any = build_eval_loader(Numbers(7), batch_size=3, collate_fn=as_list, **options)
    assert len(loader) == 3
    for _ in range(2):
        assert list(loader) == [[0, 1, 2], [3, 4, 5], [6]]


def test_every_evaluation_draws_the_same_numbers_in_workers() -> None:
    loader = build_eval_loader(Noisy(6), batch_size=3, collate_fn=as_list, num_workers=2, persistent_workers=True)
    assert list(loader) == list(loader)


def test_evaluation_of_streams_loaders_and_empty_data() -> None:
    unsized: Any = build_eval_loader(Stream(4), batch_size=3, collate_fn=as_list, drop_last=True)
    assert list(unsized) == [[0, 1, 2]]
    with pytest.raises(TypeError):
        len(unsized)
    ready = OwnLoader(2)
    assert build_eval_loader(ready, batch_size=3) is ready
    assert list(build_eval_loader([], batch_size=3)) == [], "the shard of a rank may be empty"


def test_default_collation() -> None:
    batch = next(iter(build_train_loader(Numbers(4), batch_size=2, seed=0, shuffle=False)))
    assert torch.equal(batch, torch.tensor([0, 1]))


def test_workers_do_not_collect_garbage_of_their_parent() -> None:
    """A hook of another module may start a collection in the child before the hook of the loader runs."""
    program = """
import gc, os
os.register_at_fork(after_in_child=lambda: [[] for _ in range(100)])
from forgather.ml.trainer.loading.builders import build_train_loader
build_train_loader([1], batch_size=1, seed=0, num_workers=1)

class Group:
    def __init__(self):
        self.itself, self.owner = self, os.getpid()
    def __del__(self):
        print("own" if os.getpid() == self.owner else "inherited", flush=True)

gc.collect()
gc.disable()
gc.set_threshold(50)
Group()
gc.enable()
child = os.fork()
if child == 0:
    garbage = [[] for _ in range(100)]
    print("child", gc.isenabled(), flush=True)
    os._exit(0)
os.waitpid(child, 0)
print("parent", gc.isenabled(), flush=True)
gc.collect()
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.split("\n") == ["child True", "parent True", "own", ""]
