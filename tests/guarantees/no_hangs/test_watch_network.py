"""A cut link between two nodes: both sides name the other, and end with exit code 75.

The nodes are two network namespaces with a link between them. Where namespaces cannot be made, the test is skipped.
"""

import os
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

LIMIT_SECONDS = 6
SECONDS = 60.0
ADDRESSES = ("10.213.77.1", "10.213.77.2")


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
    words = ["-m", "tests.support.watch_job", str(directory), kind, "callback-none", "0", str(LIMIT_SECONDS)]
    ranks = []
    for rank, name in enumerate(nodes):
        variables = {
            **rank_variables(rank, len(nodes), 29555),
            "MASTER_ADDR": ADDRESSES[0],
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GLOO_SOCKET_IFNAME": f"wt{os.getpid()}{'ab'[rank]}",
        }
        ranks.append(RankProcess(rank, ["ip", "netns", "exec", name, sys.executable, *words], variables))
    return ranks


KINDS = ("ddp", "fsdp2", "pipeline") if os.environ.get("EVERY_WATCH_FAULT") == "1" else ("ddp",)


@long_search
@pytest.mark.parametrize("kind", KINDS)
def test_both_sides_of_a_cut_link_name_the_other(nodes: list[str], kind: str, tmp_path: Path) -> None:
    ranks = start(nodes, kind, tmp_path)
    deadline = time.monotonic() + SECONDS
    while not (tmp_path / "began").exists() and time.monotonic() < deadline:
        assert all(rank.returncode is None for rank in ranks), [rank.output for rank in ranks]
        time.sleep(0.05)
    ip("-n", nodes[0], "link", "set", f"wt{os.getpid()}a", "down")
    codes = finish_all(ranks, SECONDS)
    outputs = [rank.output for rank in ranks]
    assert codes == [EXIT_CODE, EXIT_CODE], outputs
    for rank, output in enumerate(outputs):
        assert f"rank {1 - rank} (host " in output and "has been unreachable for" in output, output
