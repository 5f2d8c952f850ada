"""Dispatcher: errors of the reading rank, dead ranks and abandoned passes never leave a rank waiting."""

import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from forgather.ml.distributed import DistributedError
from forgather.ml.trainer.dataloader_dispatcher import DataloaderDispatcher
from tests.support.dispatching import (
    Numbers,
    Taken,
    dispatched,
    expected_order,
    in_order,
    is_first,
    labels_of,
    mesh,
    ready,
    take,
    train_loader,
    until,
)
from tests.support.ranks import outcomes_on_ranks, run_on_ranks


class BrokenLoader:
    """Loader with a last batch that cannot be sent."""

    def __init__(self, *batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        yield from self.batches


class NoIterator:
    def __iter__(self) -> Iterator[Any]:
        raise LookupError("there is no data")


def failure_of(action: Callable[[], Any]) -> tuple[Any, ...]:
    """Return the fields of the error that all ranks raise, and whether it came in time."""
    began = time.monotonic()
    with pytest.raises(DistributedError) as error:
        action()
    return (*error.value.args, time.monotonic() - began < 10)


def _fail() -> dict[str, Any]:
    order = expected_order()
    results: dict[str, Any] = {}
    for place in (0, 1, 2, 4, 7, 18, 35, 41):
        dataset = Numbers()
        dataset.fails_at = order[place]
        loader = dispatched(train_loader(dataset))
        taken: Taken = []
        results[f"sample {place}"] = failure_of(lambda loader=loader, taken=taken: taken.extend(map(labels_of, loader)))
        position = loader.state_dict()
        dataset.fails_at = None
        results[f"around {place}"] = place, position["index"], take(loader)
    whole, broken = ready(1)[0], {"labels": (number for number in range(3))}
    for name, batches in {
        "other's first": [whole, broken],
        "second": [whole, whole, whole, broken],
        "later": [whole] * 11 + [broken],
        "sparse": [whole, {"labels": torch.ones(2, 2).to_sparse()}],
        "no mapping": [[torch.ones(2)]],
    }.items():
        results[name] = failure_of(lambda batches=batches: list(dispatched(BrokenLoader(*batches))))
    results["iterator"] = failure_of(lambda: list(dispatched(NoIterator())))
    return results


def test_reading_rank_error_is_raised_on_all_ranks_without_losing_samples() -> None:
    first, second = run_on_ranks(_fail, 2)
    order = expected_order()
    assert first.keys() == second.keys()
    for name, failure in first.items():
        if name.startswith("around"):
            place, position, rest = failure
            assert position == second[name][1] == place // 4 * 4, "after the last round that all ranks received"
            assert in_order([rest, second[name][2]]) == order[position:], place
            continue
        during, rank, error_type, message, text, in_time = failure
        assert failure == second[name], name
        assert (during, rank, in_time) == ("loading a batch", 0, True)
        if name.startswith("sample"):
            assert error_type == "DataError" and f"OSError: sample {order[int(name.split()[1])]} is broken" in message
            assert "in __getitem__" in text
    assert first["other's first"][2] == "UnsupportedValueError"
    assert "builtins.generator cannot be sent to other ranks, at labels" in first["other's first"][3]
    assert "layout torch.sparse_coo" in first["sparse"][3] and "must be a mapping" in first["no mapping"][3]
    assert first["iterator"][2:4] == ("LookupError", "there is no data")


def _fail_in_worker(place: int) -> tuple[Any, ...]:
    dataset = Numbers()
    dataset.fails_at = expected_order()[place]
    loader = dispatched(train_loader(dataset, num_workers=2))
    failure = failure_of(lambda: list(loader))
    return failure, loader.state_dict()["index"], len(multiprocessing.active_children())


def test_worker_error_is_raised_on_all_ranks() -> None:
    first, second = run_on_ranks(_fail_in_worker, 2, 22)
    assert first == second
    (_, rank, error_type, message, _, in_time), position, num_workers = first
    assert (rank, error_type, in_time, position, num_workers) == (0, "DataError", True, 20, 0)
    assert f"sample {expected_order()[22]} is broken" in message


class BadFacts(Numbers):
    """Loader that fails on one rank while a pass is prepared."""

    num_batches = 3

    def __init__(self, rank: int, *failing: str) -> None:
        super().__init__()
        self.failing = failing if dist.get_rank() == rank else ()

    def set_epoch(self, epoch: int) -> None:
        self._may_fail("set_epoch")

    def state_dict(self) -> dict[str, Any]:
        self._may_fail("state_dict")
        return {"generator": (number for number in range(3))} if "pickle" in self.failing else {}

    def load_state_dict(self, state: Any) -> None:
        pass

    def _may_fail(self, name: str) -> None:
        if name in self.failing:
            raise OSError(f"{name} fails on rank {dist.get_rank()}")


def _fail_in_preparation() -> list[Any]:
    def made(*what: Any) -> DataloaderDispatcher:
        return DataloaderDispatcher(BadFacts(*what), mesh(), "cpu")

    return [
        failure_of(lambda: made(0, "state_dict"))[1:4],
        failure_of(lambda: made(0, "pickle"))[1:3],
        failure_of(lambda: made(0, "set_epoch").set_epoch(1))[1:4],
        failure_of(lambda: made(1, "set_epoch").set_epoch(1))[1:4],
    ]


def test_error_before_a_pass_is_raised_on_all_ranks() -> None:
    first, second = run_on_ranks(_fail_in_preparation, 2)
    assert first == second
    assert first[0] == (0, "OSError", "state_dict fails on rank 0") and first[1] == (0, "TypeError")
    assert first[2:] == [(rank, "OSError", f"set_epoch fails on rank {rank}") for rank in (0, 1)]


def _die(dying: int) -> tuple[Any, float]:
    loader = dispatched(train_loader(Numbers(2000)))
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    if dist.get_rank() == dying:
        os._exit(3)
    began = time.monotonic()
    with pytest.raises(DistributedError) as error:
        list(batches)
    loader.abandon()
    return error.value.args[:2], time.monotonic() - began


@pytest.mark.parametrize("dying", [0, 1])
def test_dead_rank_is_detected_by_the_other_ranks(dying: int) -> None:
    outcomes = outcomes_on_ranks(_die, 2, dying)
    assert outcomes[dying].error_type == "RankDied"
    args, seconds = outcomes[1 - dying].value
    assert args == ("loading a batch", None) and seconds < 10


# --- end of a pass


def _abandon(num_workers: int) -> dict[str, Any]:
    dataset = Numbers(2000, seconds=0.02)
    loader = dispatched(train_loader(dataset, num_workers=num_workers), prefetch=500)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    if not is_first():
        loader.abandon()
        return {}
    began = time.monotonic()
    loader.abandon()
    seconds = time.monotonic() - began
    names = {"batch-reader", "batch-reader-end"}
    has_ended = until(lambda: not names & {thread.name for thread in threading.enumerate()})
    num_reads = dataset.num_reads
    time.sleep(0.1)
    return {
        "at once": seconds < 5,
        "has ended": has_ended,
        "reads on": dataset.num_reads > num_reads,
        "workers": until(lambda: not multiprocessing.active_children()),
    }


@pytest.mark.parametrize("num_workers", [0, 2])
def test_abandoned_pass_ends_at_once_and_stops_reading(num_workers: int) -> None:
    result = run_on_ranks(_abandon, 2, num_workers)[0]
    assert result == {"at once": True, "has ended": True, "reads on": False, "workers": True}


class Collecting(Numbers):
    """Dataset that runs the garbage collector while it reads, as Python may do at any time."""

    def __getitem__(self, index: int) -> Any:
        gc.collect()
        return super().__getitem__(index)


def _read_beside_garbage() -> int:
    group = dist.new_group(backend="gloo")
    dist.barrier(group)
    leftover: list[Any] = [group]
    leftover.append(leftover)
    gc.disable()
    try:
        # The group is garbage now, and its threads do not exist in a forked process.
        dist.destroy_process_group(group)
        del group, leftover
        loader = train_loader(Collecting(12), num_workers=2)
        num_batches = sum(1 for _ in loader)
        loader.close()
    finally:
        gc.enable()
    return num_batches


def test_forked_workers_survive_garbage_of_the_parent_process() -> None:
    assert min(run_on_ranks(_read_beside_garbage, 2)) > 0
