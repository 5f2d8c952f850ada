"""A cut link between two nodes: both sides name the other, and end with exit code 75.

The nodes are two network namespaces with a link between them. Where namespaces cannot be made, the test is skipped.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forgather.ml.distributed.watch import EXIT_CODE
from tests.support.launch import RankProcess, finish_all
from tests.support.rank_protocol import rank_variables
from tests.support.sampling import long_search
from tests.support.watch_job import KINDS as NUM_RANKS

LIMIT_SECONDS = 6
SECONDS = 60.0
# Four ranks on a loaded machine need a minute to import torch.
SECONDS_TO_START = 240.0
ADDRESSES = ("10.213.77.1", "10.213.77.2")
UNREACHABLE = r"\(host \S+, pid \d+\) has been unreachable for"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def nodes() -> Iterator[list[str]]:
    """Two network namespaces with a link between them."""
    names = [f"watch{os.getpid()}{side}" for side in "ab"]
    links = [f"wt{os.getpid()}{side}" for side in "ab"]
    if shutil.which("ip") is None:
        pytest.skip("the program ip is missing")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", links[0], "netns", names[0], "type", "veth", "peer", "name", links[1], "netns", names[1])
        for name, link, address in zip(names, links, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made: {error.stderr.decode().strip()}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def start(nodes: list[str], kind: str, directory: Path) -> list[RankProcess]:
    """Start the ranks of a job, the first half of them on the first node."""
    words = ["-m", "tests.support.watch_job", str(directory), kind, "callback-none", "0", str(LIMIT_SECONDS)]
    num_ranks = NUM_RANKS[kind][1]
    num_local = num_ranks // len(nodes)
    ranks = []
    for rank in range(num_ranks):
        node, local_rank = divmod(rank, num_local)
        variables = {
            **rank_variables(rank, num_ranks, 29555),
            "MASTER_ADDR": ADDRESSES[0],
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(num_local),
            "GLOO_SOCKET_IFNAME": f"wt{os.getpid()}{'ab'[node]}",
        }
        ranks.append(RankProcess(rank, ["ip", "netns", "exec", nodes[node], sys.executable, *words], variables))
    return ranks


KINDS = ("ddp", "fsdp2", "pipeline", "hybrid") if os.environ.get("EVERY_WATCH_FAULT") == "1" else ("ddp",)


@long_search
@pytest.mark.parametrize("kind", KINDS)
def test_both_sides_of_a_cut_link_name_the_other(nodes: list[str], kind: str, tmp_path: Path) -> None:
    ranks = start(nodes, kind, tmp_path)
    deadline = time.monotonic() + SECONDS_TO_START
    while not (tmp_path / "began").exists() and time.monotonic() < deadline:
        assert all(rank.returncode is None for rank in ranks), [rank.output for rank in ranks]
        time.sleep(0.05)
    assert (tmp_path / "began").exists(), [rank.output for rank in ranks]
    ip("-n", nodes[0], "link", "set", f"wt{os.getpid()}a", "down")
    codes = finish_all(ranks, SECONDS)
    outputs = [rank.output for rank in ranks]
    assert codes == [EXIT_CODE] * len(ranks), outputs
    half = len(ranks) // 2
    for rank, output in enumerate(outputs):
        own, others = (range(half), range(half, len(ranks)))[:: 1 if rank < half else -1]
        assert all(re.search(f"rank {other} {UNREACHABLE}", output) for other in others), output
        assert not any(re.search(f"rank {other} {UNREACHABLE}", output) for other in own), output
