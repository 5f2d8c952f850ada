"""Gathers of unequal payloads: the result on every rank, and the bytes that are sent."""

import random

import pytest
import torch
import torch.distributed as dist

from forgather.ml.distributed import Peers
from forgather.ml.distributed.payload_gather import first_ranks, gather_payloads, padded_width
from tests.support.ranks import run_on_ranks

LONG = 200_000


def payload_of(rank: int, case: str) -> bytes:
    generator = random.Random(rank)
    return {
        "equal": b"same on all ranks",
        "equal and long": bytes(LONG),
        "one long": generator.randbytes(LONG if rank == 1 else 10),
        "different lengths": generator.randbytes(3 * rank + 1),
        "two kinds": bytes([rank % 2]) * 50,
        "empty on one": b"" if rank == 0 else b"x",
    }[case]


CASES = ("equal", "equal and long", "one long", "different lengths", "two kinds", "empty on one")


def gather_all_cases() -> dict[str, list[bytes]]:
    return {case: gather_payloads(payload_of(dist.get_rank(), case), None, torch.device("cpu")) for case in CASES}


def gather_values() -> tuple[list[dict[str, int]], bool]:
    values = Peers.world().gather({"kind": dist.get_rank() % 2})
    return values, values[0] is values[2]


def test_every_rank_receives_every_payload() -> None:
    for received in run_on_ranks(gather_all_cases, 3):
        for case in CASES:
            assert received[case] == [payload_of(rank, case) for rank in range(3)], case


def test_equal_values_are_decoded_once() -> None:
    for values, is_one_object in run_on_ranks(gather_values, 3):
        assert values == [{"kind": 0}, {"kind": 1}, {"kind": 0}]
        assert is_one_object


@pytest.mark.parametrize("num_ranks", [2, 64, 4096])
def test_one_long_payload_does_not_pad_the_others(num_ranks: int) -> None:
    lengths = [1_000_000] + [100] * (num_ranks - 1)
    width = padded_width(lengths, num_ranks)
    sent = num_ranks * width + sum(max(0, length - width) for length in lengths)
    assert width <= 100 or num_ranks == 2
    assert sent <= 2 * sum(lengths)


def test_padded_width_has_the_lowest_cost() -> None:
    generator = random.Random(0)
    for _ in range(200):
        num_ranks = generator.randint(2, 40)
        lengths = [generator.choice([5, 100, 30_000, 90_000]) for _ in range(generator.randint(1, num_ranks))]

        def cost(width: int, lengths: list[int] = lengths, num_ranks: int = num_ranks) -> int:
            rest = [length - width for length in lengths if length > width]
            return num_ranks * width + sum(rest) + 2**14 * len(rest)

        assert cost(padded_width(lengths, num_ranks)) == min(map(cost, [0, *lengths]))


def test_each_distinct_payload_has_one_sender() -> None:
    assert first_ranks([(1, 0, 0), (2, 0, 0), (1, 0, 0), (1, 0, 5)]) == [0, 1, 3]
