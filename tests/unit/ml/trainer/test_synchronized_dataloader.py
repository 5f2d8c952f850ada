"""SynchronizedDataLoader: ranks read their own batches, and stop, fail and save their position together."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.checkpoint.state.rng import RNGState
from forgather.ml.distributed import DistributedError
from forgather.ml.trainer.loading.builders import build_train_loader
from forgather.ml.trainer.loading.data_order import Part
from forgather.ml.trainer.loading.random_numbers import host_generators
from forgather.ml.trainer.setup.seeding import seed_host_generators
from forgather.ml.trainer.synchronized_dataloader import NOTHING, Rounds, SynchronizedDataLoader
from tests.support.ranks import run_on_ranks


class Counting:
    """Loader with a live position; without `goes_on`, an iterator restarts unless a position was loaded."""

    def __init__(self, num_batches: int, claimed: int | None = None, goes_on: bool = False) -> None:
        self.num_available = num_batches
        self.claimed = num_batches if claimed is None else claimed
        self.goes_on = goes_on
        self.state = {"done": [0]}
        self.has_loaded = False
        self.fails_at: int | None = None
        self.failing: set[str] = set()
        self.num_closed = 0

    def __len__(self) -> int:
        return self.claimed

    def __iter__(self) -> Iterator[int]:
        self._may_fail("iter")
        return self._numbers()

    def _numbers(self) -> Iterator[int]:
        if not (self.goes_on or self.has_loaded):
            self.state["done"][0] = 0
        self.has_loaded = False
        while (number := self.state["done"][0]) < self.num_available:
            if number == self.fails_at:
                raise OSError(f"batch {number} is broken")
            self.state["done"][0] += 1
            yield number

    def set_epoch(self, epoch: int) -> None:
        self._may_fail("set_epoch")
        self.state["done"][0], self.has_loaded = 0, False

    def state_dict(self) -> dict[str, Any]:
        self._may_fail("state_dict")
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state, self.has_loaded = {"done": list(state["done"])}, True

    def close(self) -> None:
        self.num_closed += 1

    def _may_fail(self, name: str) -> None:
        if name in self.failing:
            raise OSError(f"{name} fails")


def take(loader: Any, stop: int | None = None) -> list[Any]:
    taken = []
    for batch in loader:
        taken.append(batch)
        if len(taken) == stop:
            break
    return taken


def failure_of(action: Callable[[], Any]) -> tuple[Any, ...]:
    with pytest.raises(DistributedError) as error:
        action()
    return error.value.args


def own_part(dataset: Any, **options: Any) -> Any:
    part = Part(dist.get_rank(), dist.get_world_size())
    return build_train_loader(dataset, batch_size=2, seed=3, part=part, **options)


# --- the end of a pass


def _stop_together() -> list[Any]:
    rank = dist.get_rank()
    results = []
    for lengths in ((0, 5, 5), (5, 5, 0), (3, 7, 4), (7, 1, 2), (2, 2, 2), (150, 130, 140)):
        inner = Counting(lengths[rank], claimed=9)
        loader = SynchronizedDataLoader(inner, "cpu")
        first = take(loader)
        state = loader.state_dict()["done"][0]
        again = take(loader)
        results.append((first, state, again, len(loader), loader.num_available, loader._dataloader is inner))
    return results


def test_all_ranks_stop_with_the_shortest_loader_for_any_declared_lengths() -> None:
    lengths = [(0, 5, 5), (5, 5, 0), (3, 7, 4), (7, 1, 2), (2, 2, 2), (150, 130, 140)]
    for rank, results in enumerate(run_on_ranks(_stop_together, 3)):
        for of_ranks, result in zip(lengths, results, strict=True):
            numbers = list(range(min(of_ranks)))
            assert result == (numbers, len(numbers), numbers, 9, of_ranks[rank], True), (of_ranks, rank)


def _leave_early() -> list[Any]:
    results: list[Any] = []
    for goes_on in (True, False):
        inner = Counting(20 + dist.get_rank(), goes_on=goes_on)
        loader = SynchronizedDataLoader(inner, "cpu")
        for stop in (1, 2, 3, 5):
            results.append((take(loader, stop), loader.state_dict()["done"][0]))
        loader.close()
        results.append((loader.state_dict()["done"][0], inner.num_closed > 0))
        results.append((take(loader), loader.state_dict()["done"][0]))
        loader.load_state_dict({"done": [3]})
        results.append((take(loader, 4)[-1], loader.state_dict()["done"][0]))
        loader.set_epoch(1)
        results.append((take(loader, 3), loader.state_dict()["done"][0]))
    return results


def test_left_pass_keeps_the_position_of_the_delivered_batches() -> None:
    first, second = run_on_ranks(_leave_early, 2)
    assert first == second
    ranges = [(0, 1), (1, 3), (3, 6), (6, 11)]
    assert first[:4] == [(list(range(*one)), one[1]) for one in ranges]
    assert first[4:8] == [(11, True), (list(range(11, 20)), 20), (6, 7), ([0, 1, 2], 3)]
    assert first[8:12] == [(list(range(stop)), stop) for stop in (1, 2, 3, 5)]
    assert first[12:] == [(5, True), (list(range(20)), 20), (6, 7), ([0, 1, 2], 3)]


# --- errors


def _fail() -> dict[str, Any]:
    rank = dist.get_rank()
    results: dict[str, Any] = {}
    for place in (0, 1, 2, 5, 64, 65):
        inner = Counting(80, goes_on=True)
        inner.fails_at = place if rank == 1 else None
        loader = SynchronizedDataLoader(inner, "cpu")
        taken: list[Any] = []
        failure = failure_of(lambda loader=loader, taken=taken: taken.extend(loader))
        failed_at = loader.state_dict()["done"][0]
        inner.fails_at = None
        results[f"batch {place}"] = failure, len(taken), failed_at, take(loader)
    for what in ("iter", "state_dict"):
        inner = Counting(5)
        inner.failing = {what} if rank == 1 else set()
        results[what] = failure_of(lambda inner=inner: take(SynchronizedDataLoader(inner, "cpu")))
    inner = Counting(5)
    inner.failing = {"set_epoch"} if rank == 1 else set()
    results["set_epoch"] = failure_of(lambda: SynchronizedDataLoader(inner, "cpu").set_epoch(1))
    results["notes"] = failure_of(lambda: take(SynchronizedDataLoader(Counting(5), "cpu", notes=_bad_notes)))
    return results


def _bad_notes(batch: Any) -> list[int]:
    if batch == 3 and dist.get_rank() == 1:
        raise OSError("no notes on rank 1")
    return [1]


def test_error_on_one_rank_is_the_same_on_all_and_loses_no_batch() -> None:
    first, second = run_on_ranks(_fail, 2)
    assert first == second
    for name, result in first.items():
        failure = result[0] if name.startswith("batch") else result
        assert failure[1:3] == (1, "OSError"), name
    for place in (0, 1, 2, 5, 64, 65):
        failure, num_taken, failed_at, rest = first[f"batch {place}"]
        assert failure[0] == "loading a batch" and failure[3] == f"batch {place} is broken"
        assert (num_taken, failed_at, rest) == (place, place, list(range(place, 80)))
    assert first["iter"][3] == "iter fails" and first["set_epoch"][3] == "set_epoch fails"


def _fail_after_the_last_batch_needed() -> list[Any]:
    inner = Counting(20, goes_on=True)
    inner.fails_at = 4 if dist.get_rank() == 1 else None
    loader = SynchronizedDataLoader(inner, "cpu", notes=lambda _: [1])
    taken = take(loader, 4)
    notes = loader.latest_notes()
    loader.close()
    return [taken, notes, loader.state_dict()["done"][0], failure_of(lambda: take(loader))[3]]


def test_error_in_an_unused_prefetched_batch_is_not_raised() -> None:
    results = run_on_ranks(_fail_after_the_last_batch_needed, 2)
    assert results == [[[0, 1, 2, 3], [2], 4, "batch 4 is broken"]] * 2


# --- alone


def _alone() -> list[Any]:
    inner = Counting(3 + dist.get_rank())
    disabled = SynchronizedDataLoader(inner, "cpu", enabled=False)
    results = [take(disabled), take(disabled, 2), disabled.state_dict() is inner.state]
    group = [dist.new_group([rank], backend="gloo") for rank in range(2)][dist.get_rank()]
    results.append(take(SynchronizedDataLoader(inner, "cpu", process_group=group)))
    disabled.set_epoch(0)
    disabled.close()
    return results


def test_single_process_and_unsynchronised_loaders_get_all_batches() -> None:
    for rank, results in enumerate(run_on_ranks(_alone, 2)):
        assert results == [list(range(3 + rank)), [0, 1], True, list(range(3 + rank))]
    inner = Counting(3)
    loader = SynchronizedDataLoader(inner, "cpu")
    assert take(loader) == [0, 1, 2] and loader.state_dict() == {"done": [3]} and loader._dataloader is inner
    loader.load_state_dict({"done": [1]})
    assert inner.state == {"done": [1]}
    inner.failing = {"set_epoch"}
    with pytest.raises(OSError, match="set_epoch fails"):
        loader.set_epoch(1)


# --- notes


def _note() -> list[Any]:
    rank = dist.get_rank()

    def notes(batch: Any) -> list[int]:
        return [-1, 1] if batch is NOTHING else [10 * batch + rank, 0]

    loader = SynchronizedDataLoader(Counting(4 + rank), "cpu", notes=notes)
    seen = []
    for _ in loader:
        seen.append((loader.noted[0], loader.latest_notes()[0]))
    return [seen, loader.noted, loader.latest_notes()]


def test_batch_metadata_is_summed_over_ranks() -> None:
    first, second = run_on_ranks(_note, 2)
    assert first == second
    # From the second batch on, the newest metadata describes the next batch. At the last batch, one rank has none.
    assert first == [[(1, 1), (21, 41), (41, 61), (61, 40)], [40, 1], [40, 1]]


def _rounds() -> list[Any]:
    rounds = Rounds(iter(range(3 * dist.get_rank() + 1)), None)
    results: list[Any] = []
    for _ in range(5):
        rounds.fetch()
        one = rounds.finish()
        assert rounds.finish() is one
        results.append((None if one.item is NOTHING else one.item, one.num_items))
    if dist.get_rank() == 1:
        rounds.fail(KeyError("lost"), "testing")
    rounds.fetch()
    assert rounds.complete().has_failed
    return [results, failure_of(rounds.finish)[:4]]


def test_rounds_continue_until_no_rank_has_an_item() -> None:
    first, second = run_on_ranks(_rounds, 2)
    assert first[0] == [(0, 2), (None, 1), (None, 1), (None, 1), (None, 0)]
    assert second[0] == [(0, 2), (1, 1), (2, 1), (3, 1), (None, 0)]
    assert first[1] == second[1] == ("testing", 1, "KeyError", "'lost'")


# --- the trainer's loaders


class Numbers:
    def __init__(self, draws: bool = False) -> None:
        self.draws = draws
        self.num_reads = 0

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.num_reads += 1
        noise = random.random() + float(torch.rand(())) if self.draws else 0.0
        return {"labels": index, "noise": noise}


def _resume(num_workers: int) -> list[Any]:
    loader = SynchronizedDataLoader(own_part(Numbers(), num_workers=num_workers), "cpu")
    taken = [batch["labels"].tolist() for batch in take(loader, 5)]
    position = loader.state_dict()
    loader.close()
    other = SynchronizedDataLoader(own_part(Numbers(), num_workers=num_workers), "cpu")
    other.load_state_dict(position)
    rest, rest_here = ([batch["labels"].tolist() for batch in take(one)] for one in (other, loader))
    loader.close()
    other.close()
    return [taken, position["index"], rest, rest_here]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_dataset_parts_resume_at_their_position(num_workers: int) -> None:
    whole = [batch["labels"].tolist() for batch in build_train_loader(Numbers(), batch_size=2, seed=3)]
    for rank, (taken, index, rest, rest_here) in enumerate(run_on_ranks(_resume, 2, num_workers)):
        own = [*whole[rank::2], [-100] * 2][:8]
        assert taken == own[:5] and rest == rest_here == own[5:] and index == 20


def _draw() -> list[Any]:
    """Return whether a resumed pass draws the same noise, its length, and the reads with and without noise."""

    def noise_of(loader: Any, stop: int | None = None) -> list[Any]:
        noise = []
        for batch in loader:
            noise.append((batch["noise"].tolist(), random.random()))
            if len(noise) == stop:
                break
        return noise

    seed_host_generators(dist.get_rank())
    straight = noise_of(SynchronizedDataLoader(own_part(Numbers(draws=True)), "cpu"))
    seed_host_generators(dist.get_rank())
    loader = SynchronizedDataLoader(own_part(Numbers(draws=True)), "cpu")
    resumed = noise_of(loader, 4)
    position, generators = loader.state_dict(), host_generators()
    loader.close()
    other = SynchronizedDataLoader(own_part(Numbers(draws=True)), "cpu")
    other.load_state_dict(position)
    RNGState().load_state_dict(generators)
    resumed += noise_of(other)

    num_reads = []
    for draws in (dist.get_rank() == 1, False):
        dataset = Numbers(draws=draws)
        take(SynchronizedDataLoader(own_part(dataset), "cpu"), 4)
        num_reads.append(dataset.num_reads)
    dist.barrier()
    return [straight == resumed, len(straight), num_reads]


def test_random_draws_on_any_rank_disable_prefetch() -> None:
    assert run_on_ranks(_draw, 2) == [[True, 8, [8, 10]]] * 2


def _abandon() -> list[Any]:
    inner = Counting(9)
    loader = SynchronizedDataLoader(inner, "cpu")
    take(loader, 3)
    if dist.get_rank() == 0:
        loader.abandon()
    plain = SynchronizedDataLoader(DataLoader(list(range(9))), "cpu")  # type: ignore[arg-type]
    plain.abandon()
    return [inner.num_closed, loader.state_dict()["done"]]


def test_rank_can_stop_alone_and_closes_its_loader() -> None:
    assert run_on_ranks(_abandon, 2) == [[1, [3]], [0, [3]]]


def test_invalid_position_is_rejected_without_leaving_the_pass() -> None:
    loader = SynchronizedDataLoader(build_train_loader(list(range(9)), batch_size=3, seed=1), "cpu")
    next(iter(loader))
    before = loader.state_dict()
    for act in (loader.check_state_dict, loader.load_state_dict):
        with pytest.raises(CheckpointLoadError, match=r"dataset\.index"):
            act({**before, "index": -1})
    assert loader.state_dict() == before
    loader.check_state_dict(before)


def test_custom_loader_accepts_any_position() -> None:
    loader = SynchronizedDataLoader(Counting(5), "cpu")
    loader.check_state_dict("text")
    loader.load_state_dict({"done": [3]})
    assert list(loader.state_dict()["done"]) == [3]
