"""A stranger on the network of a job: nothing runs, nothing ends, and nothing is believed.

The stranger has another user id, and on several nodes another network namespace. It attacks every port that listens.
"""

import ast
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launch import CapturedProcess, free_port, kill_leftovers
from tests.support.namespaces import ADDRESSES, Node, linked_nodes
from tests.support.rank_nursery import REPOSITORY
from tests.support.sampling import long_search, sampled
from tests.unit.cli.program import write_plain_run

SECONDS = 120
SETTINGS = {"max_steps": 100_000, "save_steps": 100_000, "eval_strategy": "no", "disable_tqdm": True}
OPTIONS = ("-m", "forgather.cli.main", "train", "plain.yaml", "--trainer", "ddp")
SLOW = """\
import time
from forgather.ml.trainer.trainer_types import TrainerCallback

class Slow(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(0.05)
        if state.is_world_process_zero:
            print(f"at {state.global_step};", flush=True)
"""
LISTENING = "from tests.support.stranger import addresses; print(addresses())"

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="making namespaces and another user needs root")


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    with linked_nodes() as nodes:
        yield nodes
        kill_leftovers()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_plain_run(tmp_path)
    (tmp_path / "slow.py").write_text(SLOW)
    with (tmp_path / "plain.yaml").open("a") as file:
        file.write("callbacks: [{class_path: slow.Slow}]\n")
    # The stranger may write here, so that its code could leave a trace.
    tmp_path.chmod(0o777)
    return tmp_path


def start(node: Node, folder: Path, *words: str) -> CapturedProcess:
    variables = {"COLUMNS": "200", "OMP_NUM_THREADS": "1", "XDG_CONFIG_HOME": str(folder / "config")}
    if words:
        variables["GLOO_SOCKET_IFNAME"] = node.link
    settings = [word for name, value in SETTINGS.items() for word in (f"--args.{name}", str(value))]
    command = node.command(sys.executable, *OPTIONS, *settings, "--nproc", "1" if words else "2", *words)
    return CapturedProcess(command, variables, folder, name=node.name)


def listening(node: Node) -> list[tuple[str, int]]:
    command = node.command(sys.executable, "-c", LISTENING)
    output = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY).stdout
    found: list[tuple[str, int]] = ast.literal_eval(output)
    return found


def attack(where: Node, folder: Path, host: str, ports: list[int]) -> None:
    words = ("-m", "tests.support.stranger", str(folder), host, *map(str, ports))
    done = subprocess.run(
        where.command(sys.executable, *words), capture_output=True, text=True, cwd=REPOSITORY, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("attacked") == len(ports)


def check_undisturbed(jobs: list[CapturedProcess], folder: Path) -> None:
    """Let the job train on, stop it, and look for traces of the attack."""
    done = int(jobs[0].output.rpartition("at ")[2].partition(";")[0])
    jobs[0].wait_for_output(f"at {done + 60};", SECONDS)
    for job in jobs:
        os.kill(job.pid, signal.SIGTERM)
    for job in jobs:
        assert job.wait(SECONDS) == 0, job.output
        assert "forged" not in job.output and "\x1b" not in job.output
    assert not (folder / "ran").exists()
    assert list((folder / "out/checkpoints").iterdir())


def test_single_node_listens_on_loopback_and_is_not_disturbed(nodes: list[Node], folder: Path) -> None:
    job = start(nodes[0], folder)
    job.wait_for_output("at 3;", SECONDS)
    found = listening(nodes[0])
    assert found and {address for address, _ in found} == {"127.0.0.1"}
    # Another user of the machine.
    attack(nodes[0], folder, "127.0.0.1", [port for _, port in found])
    check_undisturbed([job], folder)


KINDS = {
    "fixed": ("--nnodes", "2"),
    "restarts": ("--nnodes", "2", "--max-restarts", "1"),
    "elastic": ("--nnodes", "1:2"),
}


@long_search
@pytest.mark.parametrize("kind", sampled(list(KINDS), ["fixed"]))
def test_nodes_listen_on_one_address_and_are_not_disturbed(nodes: list[Node], folder: Path, kind: str) -> None:
    endpoint = ("--rdzv-endpoint", f"{ADDRESSES[0]}:{free_port()}")
    jobs = [start(node, folder, *KINDS[kind], "--node-rank", str(rank), *endpoint) for rank, node in enumerate(nodes)]
    jobs[0].wait_for_output("at 3;", SECONDS)
    for node, other in zip(nodes, reversed(nodes), strict=True):
        found = listening(node)
        assert {address for address, _ in found} == {node.address}
        attack(other, folder, node.address, [port for _, port in found])
    check_undisturbed(jobs, folder)
