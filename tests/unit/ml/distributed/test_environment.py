"""Distributed environment of a process: single, from arguments, from variables, and under torchrun."""

import ast
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from forgather.ml.distributed import (
    DistributedEnvInterface,
    DistributedEnvironment,
    StaticDistributedEnvironment,
    from_env,
    get_global_process_group,
    get_local_rank,
    get_local_world_size,
    get_rank,
    get_world_size,
    init_from_env,
    record_entry_point,
)
from tests.support.launch import CapturedProcess, finish_all, free_port, run_torchrun, start_ranks
from tests.support.rank_protocol import rank_variables
from tests.support.ranks import run_on_ranks
from tests.support.sampling import long_search, sampled
from tests.support.warm_ranks import run_warm_ranks

JOIN = """
import torch, torch.distributed as dist
from forgather.ml.distributed import DistributedEnvironment, get_local_process_group, record_entry_point
from tests.support.rank_stacks import register

@record_entry_point
def main():
    env = DistributedEnvironment(no_accelerator=True, timeout=60.0)
    total = torch.tensor([env.rank])
    dist.all_reduce(total)
    node = dist.get_process_group_ranks(get_local_process_group())
    print(f"rank {env.rank} of {env.world_size} on {env.device}: total {int(total)}, node {node}")
    dist.destroy_process_group()

register()
main()
"""

FAIL_ON_RANK_1 = """
from forgather.ml.distributed import DistributedEnvironment, agreement, record_entry_point

@record_entry_point
def main():
    env = DistributedEnvironment(no_accelerator=True)
    with agreement("reading the configuration"):
        if env.rank == 1:
            raise KeyError("learning_rate")

main()
"""


def join_what_exists() -> tuple[int, int, int, bool]:
    world = dist.group.WORLD
    env = DistributedEnvironment(no_accelerator=True)
    return env.rank, env.world_size, env.local_world_size, dist.group.WORLD is world


def write_script(directory: Path, text: str) -> str:
    path = directory / "script.py"
    path.write_text(text)
    return str(path)


def test_static_environment_has_defaults_and_no_side_effects() -> None:
    env = StaticDistributedEnvironment()
    assert vars(env) == {
        "rank": 0,
        "local_rank": 0,
        "world_size": 1,
        "local_world_size": 1,
        "master_addr": "localhost",
        "master_port": 29501,
        "device": "cpu",
        "device_type": "cpu",
    }
    assert isinstance(env, DistributedEnvInterface)
    assert not dist.is_initialized() and "RANK" not in os.environ
    with pytest.raises(TypeError):
        StaticDistributedEnvironment(1)  # type: ignore[call-arg]


def test_environment_variables_win_and_missing_ones_are_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_ADDR", "head.node")
    env = from_env(rank=1, local_rank=1, local_world_size=2, master_port=1234, device="cuda:1")
    assert (env.rank, env.world_size, env.master_addr) == (3, 4, "head.node")
    assert (env.local_rank, env.local_world_size, env.master_port, env.device) == (1, 2, 1234, "cuda:1")
    exported = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")}
    assert exported == {"RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1234"}
    assert (get_rank(), get_world_size(), get_local_rank(), get_local_world_size()) == (3, 4, 1, 2)


def test_init_from_env_updates_the_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    env = StaticDistributedEnvironment(local_world_size=2)
    init_from_env(env)
    assert (env.local_rank, env.local_world_size, os.environ["LOCAL_WORLD_SIZE"]) == (1, 2, "2")


def test_without_variables_a_process_is_single() -> None:
    assert (get_rank(), get_world_size(), get_local_rank(), get_local_world_size()) == (0, 1, 0, 1)


def test_invalid_number_in_a_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ValueError, match="environment variable RANK is 'first'"):
        get_rank()


def test_single_process_initialises_a_group_of_one() -> None:
    env = DistributedEnvironment(no_accelerator=True, timeout=timedelta(seconds=30))
    assert isinstance(env, DistributedEnvInterface)
    assert (env.rank, env.world_size, env.device, env.device_type) == (0, 1, "cpu", "cpu")
    assert dist.get_world_size() == 1 and dist.get_backend() == "gloo"
    assert get_global_process_group() is dist.group.WORLD
    total = torch.ones(2)
    dist.all_reduce(total)
    assert total.tolist() == [1.0, 1.0]


def test_single_process_may_stay_without_a_group() -> None:
    DistributedEnvironment(no_accelerator=True, always=False, log_level="ERROR")
    assert not dist.is_initialized()
    assert logging.getLogger("forgather.ml.distributed").level == logging.ERROR


def test_existing_process_group_is_reused() -> None:
    assert run_on_ranks(join_what_exists, 2) == [(0, 2, 2, True), (1, 2, 2, True)]


def test_device_map_names_the_device() -> None:
    assert DistributedEnvironment(device_map={0: "cpu"}, always=False).device == "cpu"
    with pytest.raises(ValueError, match=r"local ranks \[1, 2\], but this is local rank 0"):
        DistributedEnvironment(device_map={1: "cpu", 2: "cpu"}, always=False)


def test_contradictory_rank_and_world_size_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ValueError, match="rank 2 does not exist among 1 process"):
        DistributedEnvironment(no_accelerator=True)


def test_entry_point_without_torchrun_is_an_ordinary_function() -> None:
    @record_entry_point
    def double(number: int) -> int:
        return 2 * number

    assert double(4) == 8
    assert double.__name__ == "double"


def test_ranks_join_by_their_variables(tmp_path: Path) -> None:
    processes = start_ranks([write_script(tmp_path, JOIN)], 2)
    assert finish_all(processes, 60.0) == [0, 0], [process.output for process in processes]
    for process in processes:
        assert f"rank {process.rank} of 2 on cpu: total 1, node [0, 1]" in process.output


@long_search
def test_ranks_join_under_torchrun_on_two_nodes(tmp_path: Path) -> None:
    agents = run_torchrun([write_script(tmp_path, JOIN)], nproc_per_node=2, nnodes=2)
    assert [agent.returncode for agent in agents] == [0, 0], agents
    assert "rank 1 of 4 on cpu: total 6, node [0, 1]" in agents[0].output
    assert "rank 2 of 4 on cpu: total 6, node [2, 3]" in agents[1].output


def test_torchrun_prints_the_root_cause(tmp_path: Path) -> None:
    (agent,) = run_torchrun([write_script(tmp_path, FAIL_ON_RANK_1)], nproc_per_node=2)
    assert agent.returncode != 0
    root_cause = agent.output.split("Root Cause")[1]
    assert "rank 1 failed while reading the configuration: KeyError: 'learning_rate'" in root_cause


WAIT = """
import signal
# A shell starts background jobs with SIGINT ignored, which child processes inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
from forgather.ml.distributed import DistributedEnvironment
DistributedEnvironment(no_accelerator=True)
"""


def start_waiting(script: str, agent_store: dist.TCPStore | None) -> CapturedProcess:
    """Start rank 0 of 2; the other rank never comes."""
    variables = {**rank_variables(0, 2, free_port() if agent_store is None else agent_store.port)}
    if agent_store is not None:
        variables.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RUN_ID="job", TORCHELASTIC_RESTART_COUNT="0")
    return CapturedProcess([sys.executable, script], variables, None, "rank 0")


def wait_for_handler(process: CapturedProcess) -> None:
    """Wait until the process handles SIGUSR1, which it does only while it meets the other ranks."""
    while process.returncode is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        if int(status.split("SigCgt:")[1].split()[0], 16) >> (signal.SIGUSR1 - 1) & 1:
            break
        time.sleep(0.02)
    # Usually the process is inside C++ by now. Otherwise the handler of Python ends it.
    time.sleep(0.2)


def test_stop_signal_ends_a_rank_that_waits_for_others(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    cases = [(signal.SIGTERM, None), (signal.SIGTERM, store), (signal.SIGINT, None)]
    script = write_script(tmp_path, WAIT)
    processes = [start_waiting(script, store) for _, store in cases]
    for process, (number, _) in zip(processes, cases, strict=True):
        wait_for_handler(process)
        assert process.returncode is None, process.output
        os.kill(process.pid, number)
    codes = finish_all(processes, 60.0)
    assert codes == [128 + number for number, _ in cases], [process.output for process in processes]
    for process, (number, _) in zip(processes, cases, strict=True):
        assert f"{number.name} received while rank 0 waits for the other 1 ranks" in process.output
        assert "Traceback" not in process.output


@pytest.mark.parametrize("seconds", sampled([1, 12], [1]))
def test_ranks_name_the_rank_that_never_joins(seconds: int) -> None:
    absent = {"host": 0, "member": 1, "last": 3}
    plans = {name: (4 if name == "last" else 2, [str(rank), str(seconds)]) for name, rank in absent.items()}
    jobs = run_warm_ranks("tests.support.absent_rank_job", plans)
    for name, rank in absent.items():
        present = [one for number, one in enumerate(jobs[name]) if number != rank]
        output = "".join(one.output for one in present)
        assert all(one.code == 1 for one in present), output
        # The ranks that end first may take the store with them.
        assert re.search(rf"RuntimeError: rank {rank}( of \d)? has not joined this job within {seconds}", output), (
            output
        )
        if seconds > 10:
            assert len(re.findall(rf"waiting for rank {rank}( at \S+)? \(10 s\)", output)) == 1


REPEAT = """
import os, subprocess, sys
import torch, torch.distributed as dist
from forgather.ml.distributed import DistributedEnvironment

for _ in range(3):
    env = DistributedEnvironment(no_accelerator=True, timeout=20.0)
    total = torch.tensor([env.rank + 1])
    dist.all_reduce(total)
    print(f"total {int(total)}", flush=True)
    dist.destroy_process_group()
# A program with ranks of its own, which would meet in the same file.
print("inherits", subprocess.check_output([sys.executable, "-c", "import os; print(os.environ.get('FORGATHER_STORE'))"]))
"""


def test_ranks_meet_again_in_the_file_of_the_launcher_and_other_programs_do_not(tmp_path: Path) -> None:
    script = write_script(tmp_path, REPEAT)
    processes = start_ranks([script], 2, {"FORGATHER_STORE": str(tmp_path / "store")})
    assert finish_all(processes, 90.0) == [0, 0], [process.output for process in processes]
    for process in processes:
        assert process.output.count("total 3") == 3
        assert "inherits b'None" in process.output


def test_missing_folder_of_the_launcher_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    variables = {**rank_variables(0, 2, free_port()), "FORGATHER_STORE": str(tmp_path / "gone/store")}
    process = CapturedProcess([sys.executable, write_script(tmp_path, WAIT)], variables, None, "rank 0")
    assert process.wait(30.0) == 1, process.output
    assert re.search(r"RuntimeError: .*gone does not exist.*Start the job again", process.output), process.output


LOCALHOST = """
import errno, os, socket, sys
import torch, torch.distributed as dist
from forgather.ml.distributed import DistributedEnvironment
from tests.support.refused_calls import SOCKET, refuse
from tests.support.stranger import addresses

if sys.argv[1] == "no family":
    refuse(SOCKET, errno.EAFNOSUPPORT, socket.AF_INET6)
rank = int(os.fork() == 0)
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
env = DistributedEnvironment(no_accelerator=True, timeout=20.0)
total = torch.tensor([env.rank + 1])
dist.all_reduce(total)
print(f"total {int(total)}", flush=True)
if rank == 0:
    print("listening", {address for address, _ in addresses()}, flush=True)
dist.barrier()
os._exit(0 if rank else os.wait()[1])
"""
CONTAINER = """
if [ "$3" = "no address" ]; then echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6; fi
set -e
ip link set lo up
mount --bind hosts /etc/hosts
exec "$@"
"""


@pytest.mark.parametrize(
    ("without", "expected"), [("no address", "127.0.0.1"), ("no family", "127.0.0.1"), ("nothing", "::1")]
)
def test_localhost_never_means_all_addresses(tmp_path: Path, without: str, expected: str) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n::1 localhost\n")
    unshare = ["unshare", "--user", "--map-root-user", "--net", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], check=False).returncode != 0:
        pytest.skip("namespaces cannot be made")
    command = [*unshare, "sh", "-c", CONTAINER, "sh", sys.executable, write_script(tmp_path, LOCALHOST), without]
    process = CapturedProcess(command, {"GLOO_SOCKET_IFNAME": "lo"}, tmp_path, "ranks")
    assert process.wait(90.0) == 0, process.output
    assert process.output.count("total 3") == 2, process.output
    assert ast.literal_eval(process.output.split("listening ")[1].splitlines()[0]) <= {"127.0.0.1", expected}
    assert "all addresses" not in process.output
