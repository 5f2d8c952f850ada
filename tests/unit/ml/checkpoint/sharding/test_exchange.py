"""ShardExchange: slices of all ranks reach the ranks that write the full tensors, in windows of a few bytes."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.components import SharingPattern, StateComponent
from forgather.ml.checkpoint.sharding.exchange import ShardExchange, StreamItem
from forgather.ml.checkpoint.sharding.sharded_tensors import shards_of
from forgather.ml.distributed import DistributedError
from tests.support.ranks import outcomes_on_ranks, run_on_ranks
from tests.support.tiny_parallel import Box, Outcome, entries, make_coordinator, raised

WINDOW_BYTES = 64
SHAPES: dict[str, tuple[int, ...]] = {
    "even": (6, 5),
    "uneven": (7, 3),
    "one row": (1, 40),
    "one element": (1,),
    "two rows": (2, 2),
    "no rows": (0, 4),
    "no columns": (4, 0),
    "vector": (17,),
    "cube": (5, 2, 3),
}
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


def full_tensors() -> dict[str, Tensor]:
    """Return the same tensors on every rank: all shapes and dtypes, and many that fit into one window."""
    generator = torch.Generator().manual_seed(5)
    found = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        values = torch.randint(0, 100, shape, generator=generator)
        found[name] = values.to(DTYPES[number % len(DTYPES)])
    for number in range(30):
        found[f"small {number}"] = torch.randint(0, 100, (1 + number % 5,), generator=generator).to(torch.uint8)
    return found


def sharded(tensors: dict[str, Tensor]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in tensors.items()}


def divided(names: list[str], how: str) -> dict[int, list[str]]:
    """Return the names that each rank writes."""
    size = dist.get_world_size()
    if how == "one writes all":
        return {rank: names if rank == size - 1 else [] for rank in range(size)}
    if how == "rank 0 writes little":
        return {0: names[:1], **{rank: names[rank :: size - 1] for rank in range(1, size)}}
    return {rank: names[rank::size] for rank in range(size)}


def full(exchange: ShardExchange, tensor: Any) -> Tensor:
    content = bytearray(b"".join(exchange.chunks(tensor)))
    if not content:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    return torch.frombuffer(content, dtype=tensor.dtype).view(tensor.shape)


def exchange_all(how: str, window_bytes: int) -> tuple[dict[str, Tensor], int]:
    """Return the full tensors that this rank has read, and the number of rounds."""
    shards_by_name = sharded(full_tensors())
    streams = {
        rank: [StreamItem(name, shards_by_name[name].numel() * shards_by_name[name].element_size()) for name in names]
        for rank, names in divided(list(shards_by_name), how).items()
    }
    shards = {name: shards_of(tensor) for name, tensor in shards_by_name.items()}
    exchange = ShardExchange(shards_by_name, shards, streams, range(dist.get_world_size()), window_bytes=window_bytes)
    with exchange:
        found = {item.key: full(exchange, shards_by_name[item.key]) for item in streams[dist.get_rank()]}
    return found, exchange.num_rounds


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("how", ["all write", "one writes all", "rank 0 writes little"])
def test_writers_get_full_tensors_bit_for_bit(how: str, num_ranks: int) -> None:
    expected = full_tensors()
    results = run_on_ranks(exchange_all, num_ranks, how, WINDOW_BYTES)
    assert len({rounds for _, rounds in results}) == 1 and results[0][1] > 5
    together = [(name, tensor) for found, _ in results for name, tensor in found.items()]
    assert sorted(name for name, _ in together) == sorted(expected)
    for name, tensor in together:
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name


def test_one_window_takes_all_small_tensors() -> None:
    results = run_on_ranks(exchange_all, 2, "all write", 1 << 20)
    assert [rounds for _, rounds in results] == [1, 1]
    assert sum(len(found) for found, _ in results) == len(full_tensors())


def save_sharded(output_dir: str, failing: tuple[int, ...]) -> tuple[Outcome, Outcome]:
    """Save twice; in the first save, some ranks cannot write the file of the state."""
    tensors = {name: tensor for name, tensor in sharded(full_tensors()).items() if tensor.numel()}
    box = Dividing(tensors)
    coordinator = make_coordinator(output_dir, [StateComponent("box", box, SharingPattern.PER_RANK)])
    real = os.open

    def refuse(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_CREAT and str(path).endswith(".pt"):
            raise OSError(28, "No space left on device", str(path))
        return real(path, flags, *args, **options)

    patch = pytest.MonkeyPatch()
    if dist.get_rank() in failing:
        patch.setattr(os, "open", refuse)
    try:
        first = raised(lambda: coordinator.save_checkpoint(checkpoint_id=1))
    finally:
        patch.undo()
    return first, raised(lambda: coordinator.save_checkpoint(checkpoint_id=2))


class Dividing(Box):
    """State that its ranks divide between them by name."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        super().__init__(**tensors)

    def part_of_state(self, state: dict[str, Any], number: int, count: int) -> dict[str, Any]:
        return {name: state[name] for name in list(state)[number::count]}


@pytest.mark.parametrize(("num_ranks", "failing"), [(2, (1,)), (3, (0, 2))])
def test_rank_that_cannot_write_fails_the_save_everywhere(
    num_ranks: int, failing: tuple[int, ...], tmp_path: Path
) -> None:
    results = run_on_ranks(save_sharded, num_ranks, str(tmp_path), failing)
    assert len(set(results)) == 1, "the same outcome on every rank"
    (error_type, message), second = results[0]
    assert error_type == "CheckpointSaveError"
    assert f"rank {failing[0]} failed" in message and "No space left on device" in message
    assert second == ("", "")
    assert entries(tmp_path / "checkpoints") == ["checkpoint-2"]
    assert store.verify_checkpoint(str(tmp_path / "checkpoints" / "checkpoint-2")) == []


def die_in_the_middle() -> int:
    """Read several windows; rank 1 dies after the second."""
    tensors = sharded({"a": torch.arange(600), "b": torch.arange(600)})
    streams = {0: [StreamItem("a", 4800)], 1: [StreamItem("b", 4800)], 2: []}
    shards = {name: shards_of(tensor) for name, tensor in tensors.items()}
    with ShardExchange(tensors, shards, streams, range(3), window_bytes=WINDOW_BYTES) as exchange:
        rank = dist.get_rank()
        for number, _ in enumerate(exchange.chunks(tensors["ab"[rank]]) if rank < 2 else ()):
            if (rank, number) == (1, 2):
                os.kill(os.getpid(), signal.SIGKILL)
    return exchange.num_rounds


def test_death_of_a_rank_ends_the_exchange_of_the_others() -> None:
    outcomes = outcomes_on_ranks(die_in_the_middle, 3)
    assert [outcome.error_type for outcome in outcomes] == [
        DistributedError.__name__,
        "RankDied",
        DistributedError.__name__,
    ]
    assert "exchanging slices of sharded tensors" in str(outcomes[0].error_message)
