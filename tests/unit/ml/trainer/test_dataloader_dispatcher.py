"""DataloaderDispatcher: the first rank reads for all ranks, which share position, end and errors."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset

from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.checkpoint.state.rng import RNGState
from forgather.ml.trainer.dataloader_dispatcher import DataloaderDispatcher
from forgather.ml.trainer.loading.random_numbers import host_generators
from forgather.ml.trainer.setup.seeding import seed_host_generators
from forgather.ml.trainer.synchronized_dataloader import SynchronizedDataLoader
from tests.support.dispatching import (
    BATCH_SIZE,
    NUM_SAMPLES,
    Numbers,
    Taken,
    dispatched,
    expected_order,
    in_order,
    is_first,
    mesh,
    ready,
    take,
    train_loader,
    until,
)
from tests.support.drawn_order import drawn_order
from tests.support.ranks import run_on_ranks


class Growing(Numbers):
    """Dataset with another length in each epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.num_samples = NUM_SAMPLES + 4 * epoch


class Noisy(Numbers):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "noise": self.draw()}


class Live:
    """Loader of ready batches that returns its live state."""

    def __init__(self, num_batches: int) -> None:
        self.num_batches = num_batches
        self.state = {"done": [0]}

    def __iter__(self) -> Iterator[Any]:
        while self.state["done"][0] < self.num_batches:
            self.state["done"][0] += 1
            yield {"labels": torch.tensor(self.state["done"])}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = {"done": list(state["done"])}


class Stream(IterableDataset[Any]):
    """Stream of ordered samples without a state."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(NUM_SAMPLES):
            yield {"labels": number}


class PositionedStream(Stream):
    done = 0

    def __iter__(self) -> Iterator[Any]:
        while self.done < NUM_SAMPLES:
            self.done += 1
            yield {"labels": self.done - 1}
        self.done = 0

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


# --- who gets what


def _two_passes(counts: list[int], drop_last: bool) -> list[Any]:
    results = []
    for count in counts:
        loader = dispatched(ready(count), drop_last=drop_last)
        results.append((len(loader), take(loader), take(loader)))
    return results


@pytest.mark.parametrize("drop_last", [False, True])
def test_each_rank_gets_its_own_batches_in_each_pass(drop_last: bool) -> None:
    counts = [0, 1, 2, 3, 75]
    for rank, results in enumerate(run_on_ranks(_two_passes, 2, counts, drop_last)):
        for count, result in zip(counts, results, strict=True):
            own: Taken = [[number] for number in range(count)][rank::2]
            if count % 2 and drop_last:
                own = own[: count // 2]
            elif count % 2 and rank == 1:
                own.append("empty of 1")
            assert result == (len(own), own, own), (count, rank)


def changing_batches() -> list[Any]:
    """Return batches of changing sizes; the first messages fit the buffer, or not, by about a byte."""
    generator = torch.Generator().manual_seed(0)
    batches: list[Any] = []
    for length in (3, 40, 4000, 1, 100_000, 0, 17, 2**20, 5, *range(3000, 4200, 60)):
        tokens = torch.randint(0, 2**40, (length,), generator=generator)
        half = tokens[: length // 2].to(torch.uint8)
        nested = {"list": [half, {"mask": half > 3, "none": None}], "text": "ä" * (length % 7), "number": length / 3}
        batches.append({"labels": tokens, "nested": nested, "pair": (True, tokens[:1].to(torch.bfloat16))})
    images = torch.rand(2, 3, 5, generator=generator)
    batches.append({"labels": torch.tensor([1, 2]), "images": images, "half": images.to(torch.bfloat16)[:, ::2]})
    return batches


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def _receive_changing_batches() -> list[str]:
    wrong = []
    for dp_mesh_dim, expected in ((None, changing_batches()), (0, changing_batches()[dist.get_rank() :: 2])):
        loader = dispatched(changing_batches(), dp_mesh_dim=dp_mesh_dim)
        for number in range(2):
            got = list(loader)
            if len(got) != len(expected):
                wrong.append(f"dim {dp_mesh_dim}, pass {number}: {len(got)} batches")
            wrong += [
                f"dim {dp_mesh_dim}, pass {number}, batch {place}"
                for place, (one, other) in enumerate(zip(got, expected, strict=False))
                if not same(one, other)
            ]
    return wrong


def test_batches_of_all_kinds_and_sizes_are_received_unchanged() -> None:
    assert len(changing_batches()) % 2 == 0
    assert run_on_ranks(_receive_changing_batches, 2) == [[], []]


def _receive_on_four() -> dict[str, Taken]:
    def on(shape: tuple[int, ...], dp_mesh_dim: int | None, num_batches: int) -> Taken:
        loader = ready(num_batches) if is_first() else None
        return take(DataloaderDispatcher(loader, mesh(*shape), "cpu", dp_mesh_dim))

    return {
        "first axis": on((2, 2), 0, 7),
        "second axis": on((2, 2), 1, 7),
        "no axis": on((4,), None, 3),
        "remainder": on((4,), 0, 6),
        "wide": on((1, 4), 0, 3),
    }


def test_two_dimensional_meshes_share_batches_along_the_other_axis() -> None:
    results = run_on_ranks(_receive_on_four, 4)
    even, odd = [[0], [2], [4], [6]], [[1], [3], [5], "empty of 1"]
    assert [one["first axis"] for one in results] == [even, even, odd, odd]
    assert [one["second axis"] for one in results] == [even, odd, even, odd]
    assert [one["no axis"] for one in results] == [[[0], [1], [2]]] * 4
    assert [one["wide"] for one in results] == [[[0], [1], [2]]] * 4
    assert [one["remainder"] for one in results] == [[[0], [4]], [[1], [5]], [[2], "empty of 1"], [[3], "empty of 1"]]


def _refused_meshes() -> list[str]:
    refused = []
    for shape, dp_mesh_dim in (((1,), 1), ((1, 1), None), ((1, 1), 2), ((1, 1), -1), ((1, 1, 1), 0)):
        with pytest.raises(ValueError, match="For a 1-D mesh, set dp_mesh_dim") as error:
            DataloaderDispatcher([], mesh(*shape), "cpu", dp_mesh_dim)
        refused.append(str(error.value))
    return refused


def test_unsupported_meshes_are_rejected() -> None:
    messages = run_on_ranks(_refused_meshes, 1)[0]
    assert (
        messages[0].startswith("A mesh of 1 dimension(s) cannot be used with dp_mesh_dim=1.")
        and "of 3 dim" in messages[4]
    )


def _facts() -> dict[str, Any]:
    growing = dispatched(train_loader(Growing()), drop_last=True)
    unknown = dispatched(number for number in ready(2))
    with pytest.raises(TypeError, match="unknown") as unknown_length:
        len(unknown)
    assert unknown.num_batches is None
    everywhere = DataloaderDispatcher(train_loader(Numbers()), mesh(), "cpu")
    with pytest.raises(AttributeError):
        everywhere._no_such_thing  # noqa: B018
    lengths = [len(growing)]
    positions = [growing.state_dict()]
    for epoch in (1, 2):
        growing.set_epoch(epoch)
        lengths.append(len(growing))
        positions.append(growing.state_dict())
    return {
        "lengths": lengths,
        "positions": [(one["epoch"], one["num_samples"]) for one in positions],
        "forwarded": (everywhere.batch_size, len(everywhere.dataset), len(everywhere)),
        "unknown": str(unknown_length.value),
    }


def test_all_ranks_have_length_and_attributes() -> None:
    first, second = run_on_ranks(_facts, 2)
    assert first["lengths"] == second["lengths"] == [10, 11, 12], "21, 23 and 25 batches on two ranks with drop_last"
    assert first["positions"] == second["positions"] == [(0, 42), (1, 46), (2, 50)]
    assert first["forwarded"] == second["forwarded"] == (2, 42, 11)


# --- position


def _take_and_resume(num_rounds: int, state: Any, num_workers: int = 0) -> tuple[Taken, Any, Taken, Any]:
    """Return some rounds, the position after them, the rest of a resumed loader, and its final position."""
    loader = dispatched(train_loader(Numbers(), num_workers=num_workers))
    if state is not None:
        loader.load_state_dict(state)
    taken = take(loader, num_rounds)
    if num_rounds > 2 and is_first() and not num_workers:
        assert until(lambda: loader.dataset.num_reads > num_rounds * dist.get_world_size() * BATCH_SIZE)
    position = loader.state_dict()
    loader.close()
    other = dispatched(train_loader(Numbers(), num_workers=num_workers))
    other.load_state_dict(position)
    rest = take(other)
    end = other.state_dict()
    other.close()
    return taken, position, rest, end


@pytest.mark.parametrize("num_workers", [0, 2])
def test_position_counts_taken_batches_for_any_number_of_ranks(num_workers: int) -> None:
    order = expected_order()
    positions, ends = [], []
    for num_ranks in (1, 2, 4) if num_workers == 0 else (2,):
        results = run_on_ranks(_take_and_resume, num_ranks, 12 // num_ranks, None, num_workers)
        taken, rest = in_order([one[0] for one in results]), in_order([one[2] for one in results])
        assert taken == order[:24] and rest == order[24:], num_ranks
        positions += [one[1] for one in results]
        ends += [one[3] for one in results]
    of_epoch = {"seed": 5, "epoch": 0, "num_samples": NUM_SAMPLES, "order_version": 2}
    assert positions == [{**of_epoch, "index": 24}] * len(positions)
    assert ends == [{**of_epoch, "index": NUM_SAMPLES}] * len(ends)


@pytest.mark.parametrize("is_older", [False, True])
def test_run_resumes_with_another_number_of_ranks(is_older: bool) -> None:
    order, state, samples = expected_order(), None, []
    if is_older:
        state = {"seed": 5, "epoch": 0, "index": 0, "num_samples": NUM_SAMPLES}
        order = drawn_order(NUM_SAMPLES, 5, 0)
    for num_ranks, num_rounds in ((2, 4), (3, 2), (1, 1), (4, 0)):
        results = run_on_ranks(_take_and_resume, num_ranks, num_rounds, state)
        state = results[-1][1]
        samples += in_order([one[0] for one in results])
        assert samples + in_order([one[2] for one in results]) == order, num_ranks


def _take_from_stream(kind: type[Stream], num_rounds: int | None, state: Any) -> tuple[Taken, Any, Taken]:
    """Return some rounds, the position after them, and the rest of the same loader."""
    loader = dispatched(train_loader(kind()))
    if state is not None:
        loader.load_state_dict(state)
    taken = take(loader, num_rounds)
    time.sleep(0.03)
    return taken, loader.state_dict(), take(loader)


@pytest.mark.parametrize(
    ("kind", "schedule"), [(Stream, [(2, 3), (1, None)]), (PositionedStream, [(2, 3), (1, 4), (2, 1)])]
)
def test_streams_resume_with_another_number_of_ranks(kind: type[Stream], schedule: list[Any]) -> None:
    state, samples = None, []
    for num_ranks, num_rounds in schedule:
        results = run_on_ranks(_take_from_stream, num_ranks, kind, num_rounds, state)
        state = results[-1][1]
        samples += in_order([one[0] for one in results])
        assert samples + in_order([one[2] for one in results]) == list(range(NUM_SAMPLES)), num_ranks


def _live_positions() -> list[Any]:
    loader = dispatched(Live(20))
    positions = []
    for _ in loader:
        time.sleep(0.01)
        positions.append(loader.state_dict()["done"][0])
    return positions


def test_loader_with_live_state_has_the_position_of_the_taken_batches() -> None:
    assert run_on_ranks(_live_positions, 2) == [list(range(2, 21, 2))] * 2


def _leave_early() -> list[Any]:
    results = []
    for stop in (1, 2, 3, 5, 10, 11):
        loader = dispatched(train_loader(Numbers()))
        taken = take(loader, stop)
        # Time to prefetch; near the end, even up to the end.
        time.sleep(0.03)
        position = loader.state_dict()
        loader.set_epoch(0)
        kept = loader.state_dict()
        second = take(loader, 2)
        loader.close()
        after_close = loader.state_dict()
        rest = take(loader)
        loader.set_epoch(1)
        results.append((taken, second, rest, [position, kept, after_close, loader.state_dict()], len(take(loader))))
    return results


def test_left_pass_continues_at_its_position() -> None:
    first, second = run_on_ranks(_leave_early, 2)
    order = expected_order()
    for stop, one, other in zip((1, 2, 3, 5, 10, 11), first, second, strict=True):
        taken, again, rest = (in_order([mine, theirs]) for mine, theirs in zip(one[:3], other[:3], strict=True))
        assert taken + again + rest == order, stop
        assert one[3] == other[3], "positions differ between ranks"
        indices = [position["index"] for position in one[3]]
        done = min(4 * stop, NUM_SAMPLES)
        assert indices == [done, done, min(done + 8, NUM_SAMPLES), 0], stop
        assert one[4] == other[4] == 11


def _leave_a_plain_loader() -> list[Any]:
    results = []
    for prefetch in (0, 2):
        loader = dispatched(ready(30), prefetch=prefetch)
        results.append([take(loader, stop) for stop in (1, 2, 4, 14, None)])
        assert loader.state_dict() is None
    return results


def test_loader_without_a_state_restarts_after_a_left_pass() -> None:
    for rank, results in enumerate(run_on_ranks(_leave_a_plain_loader, 2)):
        whole = [[number] for number in range(30)][rank::2]
        assert results == [[whole[:stop] for stop in (1, 2, 4, 14, None)]] * 2


# --- reading ahead


def _read_ahead() -> list[Any]:
    results = []
    for prefetch in (0, 1, 4):
        dataset = Numbers()
        loader = dispatched(train_loader(dataset), prefetch=prefetch)
        batches = iter(loader)
        counts = []
        for number in range(1, 5):
            next(batches)
            if is_first():
                ahead = prefetch if number > 1 else 0
                until(lambda dataset=dataset, least=number + ahead: dataset.num_reads >= least * 4)
                time.sleep(0.03)
                counts.append(dataset.num_reads // 4 - number)
        loader.close()
        results.append(counts)
        assert "batch-reader" not in {thread.name for thread in threading.enumerate()}
    return results


def test_prefetch_reads_the_configured_number_of_rounds() -> None:
    counts = run_on_ranks(_read_ahead, 2)[0]
    assert counts == [[0, 0, 0, 0], [0, 1, 1, 1], [0, 4, 4, 4]]


DRAWS: dict[str, Callable[[], float]] = {
    "python": random.random,
    "numpy": lambda: float(np.random.rand()),
    "torch": lambda: float(torch.rand(())),
}


def _draw(kind: str) -> dict[str, Any]:
    """Return the noise of an uninterrupted pass, where training draws too, and of passes resumed in the middle."""
    rounds_ahead = []

    def noise_of(loader: DataloaderDispatcher, stop: int | None = None) -> list[Any]:
        noise = []
        reads_before = loader.dataset.num_reads if is_first() else 0
        for number, batch in enumerate(loader, start=1):
            noise.append((batch["noise"].tolist(), DRAWS[kind]()))
            if is_first():
                rounds_ahead.append((loader.dataset.num_reads - reads_before) / 4 - number)
            if number == stop:
                break
        return noise

    def resumed_after(num_rounds: int) -> list[Any]:
        loader, other = (dispatched(train_loader(Noisy(DRAWS[kind])), drop_last=True) for _ in range(2))
        seed_host_generators(0)
        noise = noise_of(loader, num_rounds)
        generators = host_generators()
        loader.close()
        other.load_state_dict(loader.state_dict())
        RNGState().load_state_dict(generators)
        return noise + noise_of(other)

    seed_host_generators(0)
    straight = noise_of(dispatched(train_loader(Noisy(DRAWS[kind])), drop_last=True))
    resumed = [resumed_after(num_rounds) for num_rounds in (1, 4)]
    return {"straight": straight, "resumed": resumed, "ahead": set(rounds_ahead)}


@pytest.mark.parametrize("kind", DRAWS)
def test_data_that_draws_random_numbers_is_not_prefetched_and_resumes_exactly(kind: str) -> None:
    for rank, result in enumerate(run_on_ranks(_draw, 2, kind)):
        assert len(result["straight"]) == 10 and result["resumed"] == [result["straight"]] * 2
        assert result["ahead"] == ({0} if rank == 0 else set())


# --- together with synchronizing


def _synchronized() -> list[Any]:
    """Wrap the dispatcher like the trainer: every rank prefetches one more batch."""
    loader = SynchronizedDataLoader(dispatched(train_loader(Numbers())), "cpu")
    results: list[Any] = []
    for stop in (1, 4, 3, None):
        results.append((take(loader, stop), loader.state_dict()["index"]))
    loader.set_epoch(1)
    results.append((take(loader, 5), loader.state_dict()["index"]))
    loader.close()
    results.append((take(loader), loader.state_dict()["index"]))
    plain = SynchronizedDataLoader(dispatched(ready(20)), "cpu")
    assert take(plain, 4) == take(plain)[:4]
    return results


def test_dispatched_loader_can_be_synchronised() -> None:
    first, second = run_on_ranks(_synchronized, 2)
    samples = [in_order([one[0], other[0]]) for one, other in zip(first, second, strict=True)]
    assert [number for one in samples[:4] for number in one] == expected_order()
    assert sorted(samples[4] + samples[5]) == list(range(NUM_SAMPLES))
    assert [one[1] for one in first] == [one[1] for one in second] == [4, 20, 32, 42, 20, 42]


def _refuse_positions() -> list[Any]:
    """Check invalid positions in the middle of a pass, which continues unchanged."""
    loader = dispatched(train_loader(Numbers()) if is_first() else None)
    passing = iter(loader)
    first = next(passing)["labels"].tolist()
    before, refused = loader.state_dict(), []
    for hostile in ({**before, "index": "text"}, {**before, "index": NUM_SAMPLES + 1}, None):
        try:
            loader.check_state_dict(hostile)
        except CheckpointLoadError as error:
            refused.append(str(error).split(" in the checkpoint")[0])
    unchanged = loader.state_dict() == before
    rest = [batch["labels"].tolist() for batch in passing]
    return [refused, unchanged, 1 + len(rest), first]


def test_reading_rank_rejects_an_invalid_position() -> None:
    reading, other = run_on_ranks(_refuse_positions, 2)
    assert reading[0] == ["dataset.index", "dataset.index", "dataset"] and other[0] == []
    assert reading[1:3] == other[1:3] == [True, 11]
