"""Rank harness: results, errors, hangs and deaths of ranks, and reuse of workers."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.rank_nursery import NurseryProcess, WarmProgram
from tests.support.ranks import RankFailure, RankTimeout, nursery, outcomes_on_ranks, run_on_ranks

NEXT_PROCESS_ID = Path("/proc/sys/kernel/ns_last_pid")


def describe_rank(offset: int) -> tuple[int, int, str, int]:
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    return dist.get_rank() + offset, dist.get_world_size(), os.environ["RANK"], int(total)


def raise_on_rank(failing_rank: int) -> str:
    if dist.get_rank() == failing_rank:
        raise KeyError("nothing under this key")
    return "fine"


def wait_for_a_rank_that_raised() -> None:
    if dist.get_rank() == 1:
        raise KeyError("nothing under this key")
    dist.all_reduce(torch.zeros(1))


def hang_in_different_places() -> None:
    if dist.get_rank() == 0:
        sleep_for_ever()
    dist.barrier()


def sleep_for_ever() -> None:
    time.sleep(1000)


def die_on_rank(dying_rank: int) -> int:
    # A rank that is still joining the group would wait for the dead one until its time limit.
    dist.barrier()
    if dist.get_rank() == dying_rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


def process_id() -> int:
    return os.getpid()


def leave_traces(directory: str) -> None:
    dist.new_group(backend="gloo")
    os.chdir(directory)
    os.environ["A_TRACE"] = "left"
    torch.set_default_dtype(torch.float64)


def surroundings() -> tuple[str, str | None, torch.dtype, int, float]:
    number = float(torch.rand(1))
    return os.getcwd(), os.environ.get("A_TRACE"), torch.get_default_dtype(), int(os.environ["MASTER_PORT"]), number


def leave_a_thread() -> int:
    threading.Thread(target=sleep_for_ever, daemon=True).start()
    return os.getpid()


def exit_with_code(code: int) -> None:
    sys.exit(code)


def return_something_unpicklable() -> object:
    return threading.Lock()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_are_in_rank_order(world_size: int) -> None:
    total = world_size * (world_size + 1) // 2
    expected = [(rank + 10, world_size, str(rank), total) for rank in range(world_size)]
    assert run_on_ranks(describe_rank, world_size, 10) == expected


def test_exception_is_reported_with_rank_and_traceback() -> None:
    with pytest.raises(RankFailure, match=r"1 of 2 ranks failed\n--- rank 1 ---\nTraceback") as failure:
        run_on_ranks(raise_on_rank, 2, 1)
    assert list(failure.value.errors) == [1]
    error_type, message, traceback_text = failure.value.errors[1]
    assert (error_type, message) == ("KeyError", "'nothing under this key'")
    assert "in raise_on_rank" in traceback_text


def test_outcomes_describe_each_rank_without_raising() -> None:
    fine, failed = outcomes_on_ranks(raise_on_rank, 2, 1)
    assert (fine.value, fine.error_type, fine.failed) == ("fine", None, False)
    assert (failed.value, failed.error_type, failed.failed) == (None, "KeyError", True)
    assert "in raise_on_rank" in str(failed.traceback)


def test_ranks_waiting_for_a_failed_rank_are_released() -> None:
    start = time.monotonic()
    waiting, failed = outcomes_on_ranks(wait_for_a_rank_that_raised, 2, timeout=30.0)
    assert time.monotonic() - start < 15.0
    assert failed.error_type == "KeyError"
    assert "Connection closed by peer" in str(waiting.error_message)


def test_hang_is_reported_with_the_stacks_of_all_ranks() -> None:
    before = run_on_ranks(process_id, 4)
    with pytest.raises(RankTimeout, match=r"ranks \[0, 1\] of 2 failed to finish within 1.0 seconds") as hang:
        run_on_ranks(hang_in_different_places, 2, timeout=1.0)
    rank0, rank1 = str(hang.value).split("--- rank ")[1:]
    assert rank0.startswith("0 hangs") and "in sleep_for_ever" in rank0
    assert rank1.startswith("1 hangs") and "in barrier" in rank1
    assert set(run_on_ranks(process_id, 4)) & set(before) == set(before[2:]), "hanging workers are replaced"


def test_killed_worker_is_reported_and_replaced() -> None:
    before = run_on_ranks(process_id, 2)
    with pytest.raises(RankFailure, match="the process of rank 1 died with exit code -9"):
        run_on_ranks(die_on_rank, 2, 1)
    after = run_on_ranks(process_id, 2)
    assert before[0] == after[0] and before[1] != after[1]


def test_workers_are_reused_with_fresh_state(tmp_path: Path) -> None:
    first = run_on_ranks(surroundings, 2)
    workers = set(run_on_ranks(process_id, 2))
    run_on_ranks(leave_traces, 2, str(tmp_path))
    second = run_on_ranks(surroundings, 2)
    assert set(run_on_ranks(process_id, 2)) == workers
    for (directory, trace, dtype, port, number), (*_, first_port, first_number) in zip(second, first, strict=True):
        assert (directory, trace, dtype) == (str(Path(__file__).parents[2]), None, torch.float32)
        assert port != first_port
        assert number == first_number


def test_worker_with_a_leftover_thread_is_not_reused() -> None:
    assert not set(run_on_ranks(leave_a_thread, 2)) & set(run_on_ranks(process_id, 2))


def test_exit_and_unpicklable_result_are_outcomes() -> None:
    assert [outcome.error_type for outcome in outcomes_on_ranks(exit_with_code, 2, 3)] == ["SystemExit"] * 2
    assert [outcome.error_type for outcome in outcomes_on_ranks(return_something_unpicklable, 2)] == ["TypeError"] * 2


def test_function_that_ranks_cannot_import_is_rejected() -> None:
    with pytest.raises(ValueError, match="cannot be imported by the ranks"):
        run_on_ranks(lambda: None, 2)
    with pytest.raises(ValueError, match="not between 1 and 4"):
        run_on_ranks(process_id, 5)


SESSION_THAT_ENDS_ABRUPTLY = """
import os, signal
from tests.support.ranks import run_on_ranks
from tests.support.test_ranks import process_id
print(*run_on_ranks(process_id, 2), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_exit_when_the_test_process_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SESSION_THAT_ENDS_ABRUPTLY]
    # A killed process leaves its temporary files. TMPDIR puts them where pytest removes them.
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    session = subprocess.run(
        command, cwd=Path(__file__).parents[2], env=env, capture_output=True, text=True, timeout=60
    )
    process_ids = [int(text) for text in session.stdout.split()]
    assert len(process_ids) == 2, session.stderr
    deadline = time.monotonic() + 10.0
    while any(map(is_alive, process_ids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, process_ids))


def is_alive(process_id: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process_id}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not os.access(NEXT_PROCESS_ID, os.W_OK), reason="only root chooses the next process id")
def test_process_with_the_number_of_an_ended_one_runs_and_is_not_killed_in_its_place() -> None:
    with open(os.devnull, "wb") as output:

        def start_sleep() -> NurseryProcess:
            return nursery().run(WarmProgram("tests.support.sleeping"), os.environ, "/", output.fileno())

        first = start_sleep()
        first.kill_session()
        for _ in range(100):
            NEXT_PROCESS_ID.write_text(str(first.pid - 1))
            second = start_sleep()
            if second.pid == first.pid:
                break
            second.kill_session()
        else:
            pytest.skip("other processes took the number")
        first.kill_session()
        assert first.poll() == -signal.SIGKILL and second.poll() is None
        second.kill_session()
