"""Ranks as separate processes, with and without torchrun."""

import contextlib
import re
import socket
import time
from pathlib import Path

import psutil
import pytest

from tests.support.launch import HIGHEST_PORT, finish_all, first_ephemeral_port, free_port, run_torchrun, start_ranks
from tests.support.ranks import RankTimeout
from tests.support.sampling import long_search

SAY_RANK = """
import os
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "local", os.environ["LOCAL_RANK"])
"""

WAIT = """
import os, time
from tests.support.rank_stacks import register

def wait_for_ever():
    print("waiting", os.getpid(), flush=True)
    time.sleep(1000)

register()
wait_for_ever()
"""

FAIL_ONCE = """
import os, sys
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print(f"attempt {attempt} rank {os.environ['RANK']}")
sys.exit(3 if attempt == 0 and os.environ["RANK"] == "1" else 0)
"""


def write_script(directory: Path, text: str) -> str:
    path = directory / "script.py"
    path.write_text(text)
    return str(path)


def test_free_ports_are_below_the_ephemeral_range() -> None:
    if first_ephemeral_port() > HIGHEST_PORT:
        pytest.skip("nearly all ports of this system are ephemeral")
    ports = {free_port() for _ in range(200)}
    # The system takes ephemeral ports for listeners and connections from the same range.
    with contextlib.ExitStack() as stack:
        given = {stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(200)}
    assert max(ports) < min(given)
    # Two jobs that start at the same moment rarely draw the same port.
    assert len(ports) > 190


def test_ranks_get_their_environment_variables(tmp_path: Path) -> None:
    processes = start_ranks([write_script(tmp_path, SAY_RANK)], 3)
    assert finish_all(processes, 30.0) == [0, 0, 0]
    assert [process.output for process in processes] == [f"rank {rank} of 3 local {rank}\n" for rank in range(3)]


def test_hang_shows_the_stacks_of_all_ranks(tmp_path: Path) -> None:
    processes = start_ranks([write_script(tmp_path, WAIT)], 2)
    for process in processes:
        process.wait_for_output("waiting", 30.0)
    with pytest.raises(RankTimeout, match=r"rank 0, rank 1 did not finish within 0\.2 seconds") as hang:
        finish_all(processes, 0.2)
    assert str(hang.value).count("in wait_for_ever") == 2
    assert [process.returncode for process in processes] == [-9, -9]


def test_one_rank_can_be_killed(tmp_path: Path) -> None:
    victim, survivor = start_ranks([write_script(tmp_path, WAIT)], 2)
    victim.kill()
    assert victim.wait(5.0) == -9
    assert survivor.returncode is None
    survivor.kill()


# The test of torchrun in test_environment.py starts two agents too.
@long_search
def test_two_agents_are_two_nodes(tmp_path: Path) -> None:
    agents = run_torchrun([write_script(tmp_path, SAY_RANK)], nproc_per_node=2, nnodes=2)
    assert [agent.returncode for agent in agents] == [0, 0], agents
    for node_rank, agent in enumerate(agents):
        for local_rank in range(2):
            assert f"rank {2 * node_rank + local_rank} of 4 local {local_rank}" in agent.output


@long_search
def test_torchrun_restarts_a_failed_job(tmp_path: Path) -> None:
    (agent,) = run_torchrun([write_script(tmp_path, FAIL_ONCE)], nproc_per_node=2, max_restarts=1)
    assert agent.returncode == 0, agent.output
    assert "attempt 1 rank 0" in agent.output and "attempt 1 rank 1" in agent.output


@long_search
def test_hanging_torchrun_shows_rank_stacks_and_leaves_no_process(tmp_path: Path) -> None:
    hang = ""
    # On a busy machine, the stacks may be requested before the rank has started.
    for seconds in (4.0, 8.0, 30.0):
        with pytest.raises(RankTimeout, match="node 0 did not finish") as error:
            run_torchrun([write_script(tmp_path, WAIT)], nproc_per_node=1, timeout=seconds)
        hang = str(error.value)
        if "in wait_for_ever" in hang:
            break
    assert "in wait_for_ever" in hang
    rank = re.search(r"waiting (\d+)", hang)
    assert rank is not None
    # The killed rank stays until its parent is reaped; then it is a zombie or gone.
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(int(rank[1]))
        for _ in range(500):
            if process.status() == psutil.STATUS_ZOMBIE:
                break
            time.sleep(0.01)
        assert process.status() == psutil.STATUS_ZOMBIE
