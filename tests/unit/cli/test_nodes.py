"""`forgather train --nnodes`: a waiting node prints how many nodes are missing, and signals end the wait."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.launch import CapturedProcess, free_port, kill_leftovers
from tests.support.sampling import long_search, sampled
from tests.unit.cli.program import write_tiny_run
from tests.unit.cli.test_launch import PROGRAM, finish, start

SECONDS = 90


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    kill_leftovers()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_run(tmp_path)
    return tmp_path


def start_node(folder: Path, node_rank: int, endpoint: str, *words: str) -> CapturedProcess:
    options = ("--trainer", "ddp", "--nproc", "1", "--nnodes", "2", "--node-rank", str(node_rank))
    return start(folder, *PROGRAM, *options, "--rdzv-endpoint", endpoint, *words)


ENDS = [(signal.SIGINT, ()), (signal.SIGTERM, ("--max-restarts", "1"))]


@pytest.mark.parametrize(("number", "words"), sampled(ENDS, [ENDS[0]]))
def test_waiting_node_prints_missing_nodes_and_a_signal_ends_it(
    folder: Path, number: signal.Signals, words: tuple[str, ...]
) -> None:
    endpoint = f"localhost:{free_port()}"
    process = start_node(folder, 0, endpoint, *words)
    process.wait_for_output(f"waiting for 1 more node at {endpoint} (", SECONDS)
    family = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, number)
    assert "forgather: interrupted" in finish(process, code=130)
    assert not [one for one in family if one.is_running()]
    assert not (folder / "out").exists()


@long_search
def test_nodes_rendezvous_and_train_together(folder: Path) -> None:
    endpoint = f"localhost:{free_port()}"
    second = start_node(folder, 1, endpoint)
    second.wait_for_output(f"waiting for node 0 at {endpoint} (", SECONDS)
    first = start_node(folder, 0, endpoint)
    output = finish(first) + finish(second)
    assert "2 processes" in output and "step 5/5" in output
