"""Partition of a state between ranks: every name has one part, parts are about equal, and all ranks compute the same."""

import random

import pytest

from forgather.ml.checkpoint.sharding.partition import parts_by_size


def loads(sizes: dict[str, int], num_parts: int) -> list[int]:
    parts = parts_by_size(sizes, num_parts)
    return [sum(size for name, size in sizes.items() if parts[name] == part) for part in range(num_parts)]


def test_equal_names_are_divided_equally() -> None:
    assert parts_by_size(dict.fromkeys("abcdefgh", 10), 4) == dict(
        zip("abcdefgh", (0, 0, 1, 1, 2, 2, 3, 3), strict=True)
    )


def test_names_without_content_are_divided_too() -> None:
    assert parts_by_size(dict.fromkeys("abcd", 0), 2) == {"a": 0, "b": 0, "c": 1, "d": 1}


def test_nothing_is_divided_into_nothing() -> None:
    assert parts_by_size({}, 3) == {}


def test_fewer_names_than_ranks_have_parts_of_their_own() -> None:
    parts = parts_by_size({"a": 5, "b": 5}, 4)
    assert parts["a"] < parts["b"] <= 3


def test_one_rank_gets_everything() -> None:
    assert set(parts_by_size({"a": 1, "b": 100}, 1).values()) == {0}


@pytest.mark.parametrize("num_parts", [2, 3, 4, 7])
def test_parts_are_consecutive_and_differ_by_at_most_one_large_name(num_parts: int) -> None:
    generator = random.Random(num_parts)
    for _ in range(50):
        sizes = {str(number): generator.choice((0, 1, 30, 1000, 50_000)) for number in range(generator.randint(1, 60))}
        parts = list(parts_by_size(sizes, num_parts).values())
        assert parts == sorted(parts) and parts[0] >= 0 and parts[-1] < num_parts
        fair = sum(sizes.values()) / num_parts
        assert max(loads(sizes, num_parts)) <= fair + max(sizes.values()) + len(sizes)
