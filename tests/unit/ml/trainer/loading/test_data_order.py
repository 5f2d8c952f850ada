"""Order of training data: a function of seed and epoch, with a position of seed, epoch, index and version."""

import logging
import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from forgather.ml.checkpoint.encoding.codec import decode_state, encode_state
from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.checkpoint.state.state_schema import Violation
from forgather.ml.trainer.loading.data_order import (
    BatchRequest,
    DataOrder,
    Part,
    PositionedBatches,
    SeededSamples,
    is_stateful,
    seeded_stream,
    stable_seed,
)
from forgather.ml.trainer.loading.random_numbers import (
    draws_random_numbers,
    generator_states,
    generators_apart,
    host_generators,
)
from forgather.ml.trainer.setup.seeding import seed_host_generators
from tests.support.drawn_order import drawn_order, without_version
from tests.support.wrong_values import COUNT, INTEGER, WRONG, assert_refused


def epoch_order(seed: int, epoch: int, num_samples: int = 50) -> list[int]:
    order = DataOrder(num_samples, seed=seed, shuffle=True)
    order.start_epoch(epoch, num_samples)
    return order.samples(0, num_samples)


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_order_depends_only_on_seed_and_epoch() -> None:
    first = epoch_order(7, 3)
    torch.rand(5)
    random.random()
    assert epoch_order(7, 3) == first
    assert sorted(first) == list(range(50))


def test_other_epochs_and_seeds_have_other_orders() -> None:
    orders = [epoch_order(seed, epoch) for seed in (0, 1, 2) for epoch in (0, 1, 2)]
    assert len({tuple(order) for order in orders}) == 9


def test_seeds_and_orders_are_stable_across_machines_and_versions() -> None:
    assert stable_seed(-1, 2, 3) == 7081492033906437638
    assert epoch_order(7, 3, num_samples=10) == [2, 5, 0, 9, 3, 7, 8, 6, 4, 1]
    older = DataOrder(10, seed=7, shuffle=True)
    older.load_state_dict({"seed": 7, "epoch": 3, "index": 0, "num_samples": 10}, 10)
    assert older.samples(0, 10) == [1, 8, 2, 0, 9, 7, 3, 6, 5, 4]


def test_stable_seed_separates_its_parts() -> None:
    assert len({stable_seed(1, 23), stable_seed(12, 3), stable_seed(1, 2, 3), stable_seed(123)}) == 4
    assert all(0 <= stable_seed(part) < 2**63 for part in range(-50, 50))


def test_order_without_shuffling_is_the_dataset_order() -> None:
    order = DataOrder(10, seed=0, shuffle=False)
    assert order.samples(3, 7) == [3, 4, 5, 6]


def test_batches_start_at_the_position() -> None:
    order = DataOrder(10, seed=0, shuffle=False)
    batches = PositionedBatches(order, 4, drop_last=False)
    order.index = 3
    assert [list(batch) for batch in batches] == [[3, 4, 5, 6], [7, 8, 9]]
    assert len(batches) == 3, "the length should be of the full epoch"


def test_incomplete_batches_can_be_dropped() -> None:
    batches = PositionedBatches(DataOrder(10, seed=0, shuffle=False), 4, drop_last=True)
    assert [list(batch) for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(batches) == 2 and batches.end_of_round(8) == 8


def test_prefetch_does_not_move_the_position() -> None:
    order = DataOrder(10, seed=0, shuffle=True)
    list(PositionedBatches(order, 2, drop_last=False))
    assert order.state_dict() == {"seed": 0, "epoch": 0, "index": 0, "num_samples": 10, "order_version": 2}


def test_loaded_position_restores_its_seed(caplog: pytest.LogCaptureFixture) -> None:
    saved = DataOrder(10, seed=5, shuffle=True)
    saved.start_epoch(2, 10)
    saved.index = 4
    order = DataOrder(10, seed=6, shuffle=True)
    order.samples(0, 10)
    with caplog.at_level(logging.INFO):
        order.load_state_dict(saved.state_dict(), 10)
    assert order.samples(4, 10) == saved.samples(4, 10)
    assert "seed 5" in caplog.text and "configured 6" in caplog.text


def test_run_without_a_version_keeps_the_drawn_order() -> None:
    order = DataOrder(10, seed=5, shuffle=True)
    new = order.samples(0, 10)
    order.load_state_dict({"seed": 5, "epoch": 0, "index": 4, "num_samples": 10}, 10)
    assert order.samples(4, 10) == drawn_order(10, 5, 0)[4:] != new[4:]
    order.start_epoch(1, 10)
    assert order.samples(0, 10) == drawn_order(10, 5, 1)
    # Saved and loaded again, it is still the older run.
    again = DataOrder(10, seed=5, shuffle=True)
    again.load_state_dict(order.state_dict(), 10)
    again.start_epoch(2, 10)
    assert again.samples(0, 10) == drawn_order(10, 5, 2) and again.state_dict()["order_version"] == 1


def test_loader_switches_back_to_the_keyed_order() -> None:
    order = DataOrder(10, seed=5, shuffle=True)
    beginning, new = order.state_dict(), order.samples(0, 10)
    order.load_state_dict(without_version(beginning), 10)
    order.load_state_dict(beginning, 10)
    assert order.samples(0, 10) == new


def test_unknown_order_version_is_rejected() -> None:
    order = DataOrder(10, seed=5, shuffle=True)
    with pytest.raises(CheckpointLoadError, match=r"dataset\.order_version .* is 3, but should be 1 or 2, the orders"):
        order.load_state_dict({**order.state_dict(), "order_version": 3}, 10)
    assert order.state_dict()["order_version"] == 2


@pytest.mark.parametrize("is_older", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3, 5000])
def test_batches_follow_one_order_for_any_read_ahead(batch_size: int, is_older: bool) -> None:
    order = DataOrder(5000, seed=5, shuffle=True)
    position = {**order.state_dict(), "index": 17}
    order.load_state_dict(without_version(position) if is_older else position, 5000)
    expected = order.samples(17, 5000)
    for num_parts in (1, 3):
        parts = [PositionedBatches(order, batch_size, False, part=Part(part, num_parts)) for part in range(num_parts)]
        in_turn = [sample for one_round in zip(*parts, strict=True) for batch in one_round for sample in batch]
        assert in_turn[: len(expected)] == expected
    assert not is_older or expected == drawn_order(5000, 5, 0)[17:]


def test_position_in_a_dataset_of_another_length_is_rejected() -> None:
    state = DataOrder(10, seed=5, shuffle=True).state_dict()
    order = DataOrder(12, seed=5, shuffle=True)
    with pytest.raises(
        CheckpointLoadError, match=r"12 samples, but had 10.*skip_checkpoint_components=\[\"dataset\"\]"
    ):
        order.load_state_dict(state, 12)
    assert order.num_samples == 12, "the order was changed"


def test_batch_requests_can_be_pickled() -> None:
    request = pickle.loads(pickle.dumps(BatchRequest([3, 1], epoch=2, seed=9)))
    assert type(request) is BatchRequest and request == [3, 1] and (request.epoch, request.seed) == (2, 9)


def test_seeded_samples_keep_the_generators_in_the_main_process() -> None:
    samples = SeededSamples([10, 20, 30], forward_epoch=True)
    seed_host_generators(0)
    expected = draws()
    seed_host_generators(0)
    assert samples.__getitems__(BatchRequest([2, 0], epoch=0, seed=1)) == [30, 10]
    assert draws() == expected


def test_getitems_of_the_dataset_is_used() -> None:
    class Columns(list[int]):
        def __getitems__(self, indices: list[int]) -> Any:
            assert type(indices) is list
            return {"rows": indices}

    assert SeededSamples(Columns([1, 2]), True).__getitems__(BatchRequest([1, 0], 0, 0)) == {"rows": [1, 0]}


def test_generators_apart_restores_the_generators() -> None:
    seed_host_generators(1)
    expected = draws()
    seed_host_generators(1)
    with pytest.raises(KeyError), generators_apart():
        draws()
        raise KeyError
    assert draws() == expected


class Countdown:
    """Iterable dataset that restarts after its end, and returns its live state."""

    def __init__(self, num_samples: int) -> None:
        self.live = {"left": [num_samples]}
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[int]:
        while self.live["left"][0] > 0:
            self.live["left"][0] -= 1
            yield self.live["left"][0]
        self.live["left"][0] = self.num_samples

    def state_dict(self) -> dict[str, Any]:
        return self.live

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.live = {"left": list(state["left"])}


def test_stream_has_a_state_exactly_if_its_dataset_has() -> None:
    options: dict[str, Any] = {"seed": 0, "batch_size": 2, "forward_epoch": True, "in_workers": False}
    assert is_stateful(seeded_stream(Countdown(3), **options))
    stream = seeded_stream(range(3), **options)
    assert not is_stateful(stream) and not is_stateful(iter(stream))


def test_state_of_a_stream_is_a_snapshot() -> None:
    stream: Any = seeded_stream(Countdown(3), seed=0, batch_size=2, forward_epoch=True, in_workers=False)
    iterator = iter(stream)
    next(iterator)
    state = stream.state_dict()
    next(iterator)
    assert state == {"left": [2]}


def test_stream_remembers_its_end() -> None:
    stream: Any = seeded_stream(Countdown(3), seed=0, batch_size=2, forward_epoch=True, in_workers=False)
    iterator: Any = iter(stream)
    assert list(iterator) == [2, 1, 0]
    again: Any = iter(stream)
    again.load_state_dict(iterator.state_dict())
    assert list(again) == []


def test_stream_can_be_pickled() -> None:
    stream = seeded_stream(Countdown(3), seed=4, batch_size=2, forward_epoch=True, in_workers=True)
    stream.set_epoch(2)
    copied = pickle.loads(pickle.dumps(stream))
    assert type(copied) is type(stream) and list(copied) == [2, 1, 0]


# --- parts


def rounds_of(num_samples: int, num_parts: int, start: int = 0, **options: Any) -> list[list[list[int]]]:
    """Return the batches of all parts from a position."""
    parts = []
    for number in range(num_parts):
        order = DataOrder(num_samples, seed=3, shuffle=False)
        order.index = start
        batches = PositionedBatches(order, 3, part=Part(number, num_parts), **options)
        parts.append([list(batch) for batch in batches])
        if start == 0:
            assert len(batches) == len(parts[-1]), (num_samples, number)
    return parts


def test_batches_of_a_round_are_dealt_to_the_parts_in_turn() -> None:
    parts = rounds_of(12, 2, drop_last=False)
    assert parts == [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, 10, 11]]]
    assert rounds_of(12, 2, start=3, drop_last=False) == [[[3, 4, 5], [9, 10, 11]], [[6, 7, 8], [9, 10, 11]]]


@pytest.mark.parametrize("num_samples", range(1, 20))
@pytest.mark.parametrize("num_parts", [1, 2, 3, 4])
@pytest.mark.parametrize("drop_last", [False, True])
def test_parts_have_equal_length_and_cover_all_samples(num_samples: int, num_parts: int, drop_last: bool) -> None:
    whole = rounds_of(num_samples, 1, drop_last=drop_last)[0]
    parts = rounds_of(num_samples, num_parts, drop_last=drop_last)
    num_rounds = len(whole) // num_parts if drop_last else -(-len(whole) // num_parts)
    assert {len(part) for part in parts} == {num_rounds}
    in_turn = [batch for one_round in zip(*parts, strict=True) for batch in one_round]
    if drop_last:
        assert in_turn == whole[: num_rounds * num_parts]
        return
    # A part without a batch gets the first batch of the round, to be emptied.
    first_of_last_round = whole[(num_rounds - 1) * num_parts]
    assert in_turn == whole + [first_of_last_round] * (num_rounds * num_parts - len(whole))


@pytest.mark.parametrize("num_samples", range(20))
@pytest.mark.parametrize("drop_last", [False, True])
def test_parts_without_padding_end_early(num_samples: int, drop_last: bool) -> None:
    whole = rounds_of(num_samples, 1, drop_last=drop_last)[0]
    for num_parts in (1, 2, 3, 4):
        parts = rounds_of(num_samples, num_parts, drop_last=drop_last, fills_up=False)
        assert parts == [whole[number::num_parts] for number in range(num_parts)], num_parts


def test_part_reports_end_of_round_and_empty_batches() -> None:
    order = DataOrder(11, seed=3, shuffle=False)
    first, second = (PositionedBatches(order, 3, drop_last=False, part=Part(number, 2)) for number in range(2))
    assert [first.end_of_round(start) for start in (0, 6, 11)] == [6, 11, 11]
    assert [second.is_empty(start) for start in (0, 6, 8)] == [False, False, True]
    assert not first.is_empty(8)


def test_seed_of_a_batch_does_not_depend_on_its_part() -> None:
    order = DataOrder(12, seed=3, shuffle=True)
    whole: list[Any] = list(PositionedBatches(order, 3, drop_last=False))
    parts: list[list[Any]] = [
        list(PositionedBatches(order, 3, drop_last=False, part=Part(number, 2))) for number in (0, 1)
    ]
    in_turn = [batch for one_round in zip(*parts, strict=True) for batch in one_round]
    assert in_turn == whole and [batch.seed for batch in in_turn] == [batch.seed for batch in whole]


# --- watching


@pytest.mark.parametrize(
    "draw",
    [
        random.random,
        np.random.rand,
        lambda: np.random.permutation(3),
        lambda: torch.rand(()),
        lambda: torch.randperm(2),
    ],
    ids=["random", "numpy", "permutation", "torch", "randperm"],
)
def test_draws_from_the_global_generators_are_detected(draw: Any) -> None:
    with draws_random_numbers() as has_drawn:
        draw()
    assert has_drawn()


def test_draws_from_other_generators_are_not_detected() -> None:
    draws()
    with draws_random_numbers() as has_drawn:
        random.Random(1).random()
        np.random.default_rng(1).random()
        torch.rand((), generator=torch.Generator().manual_seed(1))
    assert not has_drawn()


def test_detection_draws_nothing_itself() -> None:
    seed_host_generators(1)
    expected = draws()
    seed_host_generators(1)
    with draws_random_numbers():
        pass
    assert draws() == expected


def test_position_outside_the_samples_is_rejected() -> None:
    order = DataOrder(10, seed=5, shuffle=True)
    before = order.state_dict()
    order.load_state_dict({**before, "index": 10}, 10)
    order.load_state_dict(before, 10)
    accepted: dict[str, Any] = {
        "seed": INTEGER,
        "epoch": COUNT,
        "index": COUNT,
        "num_samples": COUNT,
        "order_version": COUNT,
    }
    for key, fine in accepted.items():
        for name, value in WRONG.items():
            hostile = {**before, key: value}
            if name in fine:
                order.check_state_dict(hostile)
            else:
                assert_refused(lambda state: order.load_state_dict(state, 10), hostile, f"dataset.{key}", name)
    with pytest.raises(CheckpointLoadError, match=r"dataset\.index .* is 11, but should be at most .*10"):
        order.check_state_dict({**before, "index": 11})
    assert order.state_dict() == before


@pytest.mark.parametrize("key", ["num_drawn", "ended"])
def test_stream_position_with_wrong_values_is_rejected(key: str) -> None:
    class Source:
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Any) -> None:
            pass

    draws_of = iter(seeded_stream(Source(), seed=1, batch_size=1, forward_epoch=True, in_workers=False))
    state = draws_of.state_dict()  # type: ignore[attr-defined]
    for name, value in WRONG.items():
        if not (key == "ended" and name == "true"):
            load = draws_of.load_state_dict  # type: ignore[attr-defined]
            assert_refused(load, {**state, key: value}, f"dataset.iterator.{key}", name)


# --- the states of generators


def test_saved_generator_states_are_accepted() -> None:
    random.gauss(0, 1), np.random.normal()
    generator_states(host_generators())
    generator_states(decode_state(encode_state(host_generators())))


def hostile_generators() -> list[tuple[str, Any]]:
    python, numpy_state, torch_state = host_generators().values()
    version, words, normal = python
    name, key, place, has_normal, last = numpy_state
    wrong_numpy = [
        (name, key, 625, has_normal, last),
        (name, key, -1, has_normal, last),
        (name, key, True, has_normal, last),
        (name, key, "0", has_normal, last),
        (name, key[:10], place, has_normal, last),
        (name, key.astype(np.int64), place, has_normal, last),
        (name, key, place, 2, last),
        (name, key, place, has_normal, None),
        ("PCG64", key, place, has_normal, last),
        (key, key, place, has_normal, last),
        (name, key, place),
        None,
        "text",
    ]
    wrong_python = [
        (version, words[:-1], normal),
        (version, (*words[:-1], 625), normal),
        (version, (*words[:-1], -1), normal),
        (version, (*words[:-1], 2**70), normal),
        (version, words, "text"),
        (99, words, normal),
        (version, None, normal),
        None,
    ]
    wrong_torch = [
        torch_state[:-1],
        torch_state.float(),
        torch_state.reshape(1, -1),
        torch_state.to("meta"),
        torch.full_like(torch_state, 255),
        torch_state.tolist(),
        None,
    ]
    kinds = {"python": wrong_python, "numpy": wrong_numpy, "torch": wrong_torch}
    return [(kind, value) for kind, values in kinds.items() for value in values]


@pytest.mark.parametrize(("kind", "value"), hostile_generators())
def test_invalid_generator_states_are_rejected(kind: str, value: Any) -> None:
    states = {**host_generators(), kind: value}
    before = repr(host_generators())
    with pytest.raises(Violation, match=kind):
        generator_states(states)
    assert repr(host_generators()) == before
