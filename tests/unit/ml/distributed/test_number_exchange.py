"""Sums of numbers over ranks, by sockets and by a process group, and the departure of a rank."""

import tempfile
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from forgather.ml.distributed import environment
from forgather.ml.distributed.number_exchange import GroupExchange, NumberExchange, SocketExchange, number_exchange
from forgather.ml.distributed.rank_links import RankLinks
from tests.support.ranks import run_on_ranks


def _group() -> dist.ProcessGroup:
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=20))


def _exchange(kind: str) -> NumberExchange:
    links = RankLinks.connect(_group())
    assert links.sockets is not None and list(links.sockets) == [
        rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()
    ]
    return number_exchange(links) if kind == "sockets" else GroupExchange(links.group)


def _sums(kind: str) -> dict[str, list[float]]:
    rank = dist.get_rank()
    exchange = _exchange(kind)
    assert isinstance(exchange, SocketExchange if kind == "sockets" else GroupExchange)
    first = exchange.start([rank, 1, -(2**40)])
    second = exchange.start([0.1 * (rank + 1), 1e16])
    long = exchange.start([rank + number for number in range(10_000)])
    # Finish in another order than they were started.
    results = {"second": exchange.finish(second), "first": exchange.finish(first), "long": exchange.finish(long)[:2]}
    results["later"] = exchange.finish(exchange.start([rank]))
    exchange.close()
    return {name: list(sums) for name, sums in results.items()}


@pytest.mark.parametrize("kind", ["sockets", "group"])
def test_numbers_are_summed_over_all_ranks(kind: str) -> None:
    results = run_on_ranks(_sums, 3, kind)
    assert results[0] == results[1] == results[2], "not bitwise equal on all ranks"
    sums = results[0]
    assert sums["first"] == [3, 3, -3 * 2**40]
    assert sums["second"] == pytest.approx([0.6, 3e16], rel=1e-15)
    assert (sums["long"], sums["later"]) == ([3, 6], [3])


def _left_alone() -> float:
    exchange = _exchange("sockets")
    exchange.finish(exchange.start([1]))
    if dist.get_rank() == 1:
        exchange.close()
        return 0.0
    started = time.monotonic()
    with pytest.raises(OSError, match=r"closed|reset|Broken pipe"):
        exchange.finish(exchange.start([1]))
    return time.monotonic() - started


def test_departed_rank_is_noticed_at_once() -> None:
    assert max(run_on_ranks(_left_alone, 3)) < 5


def _connect_without_room(directory: str) -> tuple[bool, list[float]]:
    if dist.get_rank() == 1:
        tempfile.tempdir = directory
    try:
        links = RankLinks.connect(_group())
    finally:
        tempfile.tempdir = None
    exchange = number_exchange(links)
    return links.sockets is None, list(exchange.finish(exchange.start([1])))


def test_process_group_is_the_fallback_if_a_rank_cannot_create_a_socket(tmp_path: Path) -> None:
    directory = tmp_path / ("long" * 30)
    directory.mkdir()
    assert run_on_ranks(_connect_without_room, 2, str(directory)) == [(True, [2])] * 2


def _wait_in_vain() -> str:
    environment._requested_timeout = timedelta(seconds=1)
    try:
        exchange = _exchange("sockets")
        exchange.finish(exchange.start([1]))
        message = ""
        if dist.get_rank() == 0:
            with pytest.raises(TimeoutError) as failure:
                exchange.finish(exchange.start([1]))
            message = str(failure.value)
        dist.barrier()
        return message
    finally:
        environment._requested_timeout = None


def test_silent_rank_causes_a_timeout_error() -> None:
    assert "no message from another rank for 1 seconds" in run_on_ranks(_wait_in_vain, 2)[0]
