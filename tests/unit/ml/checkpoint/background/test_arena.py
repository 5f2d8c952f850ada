"""Staging memory: touched ahead of the first save, kept between saves, and never touched again while it is in use."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from forgather.ml.checkpoint.background.arena import StagingArena

MIB = 2**20


@pytest.fixture
def arena() -> Iterator[StagingArena]:
    arena = StagingArena(pinned=False)
    yield arena
    arena.close()


def mapping(arena: StagingArena) -> int:
    return arena.region(0, 64).data_ptr()


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def fill(arena: StagingArena, num_bytes: int) -> torch.Tensor:
    content = torch.empty(0, dtype=torch.uint8).set_(arena.region(0, num_bytes))
    return content.fill_(7)


def test_larger_save_keeps_the_memory_that_was_expected(arena: StagingArena) -> None:
    arena.expect(32 * MIB, room=128 * MIB)
    arena.reserve(8 * MIB)
    before = mapping(arena)
    arena.warm_up(96 * MIB)
    arena.reserve(96 * MIB)
    assert mapping(arena) == before
    assert arena.num_bytes >= 96 * MIB


def test_save_beyond_the_expected_room_gets_other_memory(arena: StagingArena) -> None:
    arena.expect(32 * MIB, room=64 * MIB)
    arena.warm_up(96 * MIB)
    arena.reserve(96 * MIB)
    assert fill(arena, 96 * MIB).eq(7).all()


def test_memory_beyond_the_exact_size_is_returned(arena: StagingArena) -> None:
    before = resident_bytes()
    arena.expect(256 * MIB, room=256 * MIB)
    arena.reserve(256 * MIB)
    assert resident_bytes() - before > 240 * MIB
    arena.warm_up(64 * MIB)
    arena.reserve(64 * MIB)
    assert arena.num_bytes == 64 * MIB
    assert resident_bytes() - before < 128 * MIB


def test_save_does_not_wait_for_more_than_it_needs(arena: StagingArena) -> None:
    arena.expect(4096 * MIB, room=4096 * MIB)
    arena.reserve(8 * MIB)
    assert 8 * MIB <= arena.num_bytes < 2048 * MIB


def test_threads_never_touch_memory_in_use(arena: StagingArena) -> None:
    for size in (40, 80, 120, 160):
        arena.expect(160 * MIB, room=160 * MIB)
        arena.warm_up(size * MIB)
        arena.reserve(size * MIB)
        content = fill(arena, size * MIB)
        assert content.eq(7).all()


def test_closed_arena_is_usable_again(arena: StagingArena) -> None:
    arena.expect(64 * MIB, room=64 * MIB)
    arena.close()
    assert arena.num_bytes == 0
    arena.reserve(8 * MIB)
    assert fill(arena, 8 * MIB).eq(7).all()
