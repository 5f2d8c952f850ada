"""Elastic jobs whose rendezvous host is lost, that are told to leave a node, or that have too few nodes (`make elastic`)."""

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from torch.distributed import DistError, TCPStore

from forgather.cli.launch import store_guard
from tests.guarantees.elastic.test_lost_nodes import (
    NUM_STEPS,
    SECONDS,
    assert_like_reference,
    needs_elastic,
    node,
    notes,
    reference,
    wait_for_step,
)
from tests.support.launch import CapturedProcess, free_port, kill_leftovers
from tests.unit.cli.program import call, write_tiny_run

__all__ = ["reference"]
LOST_HOST = "forgather: The connection to the rendezvous at {} was lost"
REMEDY = "Start the job again on all nodes; it resumes from the newest checkpoint."


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    kill_leftovers()


def start_job(folder: Path, num_nodes: int, *more: str) -> tuple[list[CapturedProcess], str]:
    """Start a job of 2 to 4 nodes on `num_nodes` nodes, and wait until it trains."""
    write_tiny_run(folder)
    endpoint = f"localhost:{free_port()}"
    nodes = [node(folder, number, endpoint, "--max-restarts", "2", *more) for number in range(num_nodes)]
    wait_for_step(folder, 5, num_nodes, nodes)
    return nodes, endpoint


def descendants(nodes: list[CapturedProcess]) -> list[psutil.Process]:
    return [child for one in nodes for child in psutil.Process(one.pid).children(recursive=True)]


def assert_all_end(processes: list[psutil.Process]) -> None:
    """Wait until no process is left; orphans of a killed launcher may need a moment."""
    _, left = psutil.wait_procs(processes, timeout=SECONDS)
    assert not left, [process.cmdline() for process in left]


def assert_ends_with_remedy(one: CapturedProcess, endpoint: str) -> None:
    assert one.wait(SECONDS) == 1, one.output
    assert LOST_HOST.format(endpoint) in one.output and REMEDY in one.output
    assert "Traceback" not in one.output and "frame #" not in one.output


def finish_again(folder: Path, reference: Path) -> None:
    """Start the job again, as the message says, and compare it with the uninterrupted run."""
    endpoint = f"localhost:{free_port()}"
    for one in [node(folder, number, endpoint) for number in range(2)]:
        assert one.wait(SECONDS) == 0, one.output
    assert_like_reference(folder, reference)


@needs_elastic
@pytest.mark.parametrize("with_workers", [True, False], ids=["with its workers", "launcher only"])
def test_loss_of_the_rendezvous_host_ends_all_launchers_with_a_remedy(
    with_workers: bool, reference: Path, tmp_path: Path
) -> None:
    nodes, endpoint = start_job(tmp_path, 3)
    workers = descendants(nodes)
    host, *others = nodes
    if with_workers:
        host.kill()
    else:
        os.kill(host.pid, signal.SIGKILL)
    for one in others:
        assert_ends_with_remedy(one, endpoint)
    assert_all_end(workers)
    finish_again(tmp_path, reference)


@needs_elastic
def test_silent_rendezvous_host_ends_all_launchers_with_a_remedy(tmp_path: Path) -> None:
    nodes, endpoint = start_job(tmp_path, 3)
    host, *others = nodes
    workers = descendants(others)
    # A stopped host answers like a machine without power: its connections stay open.
    for process in [psutil.Process(host.pid), *descendants([host])]:
        process.suspend()
    for one in others:
        assert_ends_with_remedy(one, endpoint)
    assert_all_end(workers)


@needs_elastic
def test_node_that_gets_sigterm_saves_and_the_others_go_on_without_losing_a_step(
    reference: Path, tmp_path: Path
) -> None:
    # Only the save of the signal can have the step: no other is due.
    nodes, _ = start_job(tmp_path, 3, f"--args.save_steps={NUM_STEPS}")
    workers = descendants(nodes[2:])
    os.kill(nodes[2].pid, signal.SIGTERM)
    for one in nodes:
        assert one.wait(SECONDS) == 0, one.output
    assert_all_end(workers)
    assert "preempted by SIGTERM at step" in nodes[2].output
    assert "the job continues on 2 nodes (before: 3)" in nodes[0].output
    assert "without a heartbeat" not in nodes[0].output + nodes[1].output
    last, first = (
        max(note["step"] for note in notes(tmp_path) if note["size"] == 3),
        min(note["step"] for note in notes(tmp_path) if note["size"] == 2),
    )
    assert first == last + 1
    assert_like_reference(tmp_path, reference)


@needs_elastic
def test_sigterm_at_the_rendezvous_host_saves_and_ends_the_job(reference: Path, tmp_path: Path) -> None:
    nodes, endpoint = start_job(tmp_path, 2, f"--args.save_steps={NUM_STEPS}")
    workers = descendants(nodes)
    os.kill(nodes[0].pid, signal.SIGTERM)
    assert nodes[0].wait(SECONDS) == 0, nodes[0].output
    assert_ends_with_remedy(nodes[1], endpoint)
    assert_all_end(workers)
    last = max(note["step"] for note in notes(tmp_path))
    assert (tmp_path / f"out/checkpoints/checkpoint-{last + 1}").is_dir()
    finish_again(tmp_path, reference)


@needs_elastic
def test_sigterm_at_all_launchers_saves_and_ends_all_with_0(tmp_path: Path) -> None:
    nodes, _ = start_job(tmp_path, 3, f"--args.save_steps={NUM_STEPS}")
    for one in nodes:
        os.kill(one.pid, signal.SIGTERM)
    for one in nodes:
        assert one.wait(SECONDS) == 0, one.output


@needs_elastic
def test_job_below_the_minimum_waits_and_goes_on_when_a_node_returns(reference: Path, tmp_path: Path) -> None:
    nodes, endpoint = start_job(tmp_path, 2)
    nodes.pop().kill()
    nodes[0].wait_for_output(f"1 of at least 2 nodes at {endpoint}; waiting ", SECONDS)
    assert re.search(r"; waiting 8\d\d s more", nodes[0].output), nodes[0].output
    nodes.append(node(tmp_path, 1, endpoint))
    for one in nodes:
        assert one.wait(SECONDS) == 0, one.output
    assert_like_reference(tmp_path, reference)


@needs_elastic
def test_job_below_the_minimum_ends_with_a_message_after_the_timeout(tmp_path: Path) -> None:
    nodes, endpoint = start_job(tmp_path, 2, "--node-timeout", "25")
    nodes.pop().kill()
    assert nodes[0].wait(SECONDS) == 1, nodes[0].output
    assert f"Fewer than 2 nodes met at --rdzv-endpoint {endpoint} within 25 s (--node-timeout)" in nodes[0].output


@pytest.mark.parametrize("nodes", ["4:2", "0:2", "0", "two", "a:b", "1:2:3", "-1:2", ":"])
def test_wrong_numbers_of_nodes_are_usage_errors(nodes: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer = call(capsys, "train", f"--nnodes={nodes}", "--rdzv-endpoint", "localhost:29400")
    assert answer.code == 2 and f"--nnodes {nodes}: expected" in answer.errors and "Traceback" not in answer.errors


def test_call_to_a_silent_store_fails_instead_of_waiting_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_guard, "SILENCE_SECONDS", 2)
    host = CapturedProcess(
        [sys.executable, "-c", HOST],
        {},
        None,
        name="host",
    )
    host.wait_for_output("\n", SECONDS)
    port = int(host.output)
    store = TCPStore("localhost", port, is_master=False)
    guard = store_guard.StoreGuard("localhost", port)
    # Answers arrive: the guard does nothing.
    time.sleep(3)
    store.compare_set("key", "", "value")
    psutil.Process(host.pid).suspend()
    with pytest.raises(DistError):
        # The host may answer until its last thread has stopped. Then a call waits without a time limit.
        while True:
            store.compare_set("key", "value", "other")
    guard.stop()


HOST = """
import time
from torch.distributed import TCPStore
store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""
