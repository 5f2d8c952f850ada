"""SIGKILL of any rank at any file operation of a save: the next start resumes the newest complete checkpoint."""

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forgather.ml.checkpoint import store
from forgather.ml.distributed import Peers
from tests.support.faults.job import Job, debris
from tests.support.launch import CapturedProcess
from tests.support.rank_nursery import WarmProgram
from tests.support.ranks import outcomes_on_ranks
from tests.support.sampling import long_search, sampled

KILLED = -signal.SIGKILL
RAISED = 3
ALL_KINDS = {"create", "open", "pwrite", "ftruncate", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir"}
# One rank creates a directory and fsyncs its entry. The other ranks find it.
RACED = ("mkdir checkpoints/.tmp", "fsync checkpoints #", "mkdir .tmp", "fsync . #")
FLAT_VARIANTS = sampled(
    [(1, "exchange"), (2, "exchange"), (2, "renames"), (1, "background"), (2, "background"), (2, "sharded")],
    [(1, "exchange")],
)
ERRORS = ("CheckpointSaveError", "CheckpointError", "CheckpointLoadError", "DistributedError")


@pytest.fixture
def fast_directory() -> Iterator[Path]:
    """Directory in memory if possible: a kill does not depend on the disk, and each save waits for fsync often."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=base, prefix="kill_points_") as directory:
        yield Path(directory)


def kill_everywhere(world_size: int, replacement: str, directory: Path, every: int = 1) -> dict[str, Any]:
    """Kill the job at each of its file operations, or at every nth, and return the report."""
    report_path = directory / "report.json"
    arguments = (str(world_size), replacement, str(directory), str(report_path), str(every))
    process = CapturedProcess(WarmProgram("tests.support.faults.kill_points", arguments), {}, None, "kill points")
    assert process.wait(timeout=300) == 0, process.output
    report: dict[str, Any] = json.loads(report_path.read_text())
    return report


def kinds_of(report: dict[str, Any], rank: int) -> set[str]:
    points = [outcome["point"] for outcome in report["outcomes"]]
    return {point["operation"].split()[0] for point in points if point["rank"] == rank}


def check_outcome(
    outcome: dict[str, Any], digests: dict[str, list[str]], errors: tuple[str, ...] = ERRORS
) -> list[str]:
    """Return the problems after one kill."""
    wrong = [f"{name} is not complete" for name in outcome["misleading"]]
    for rank, facts in enumerate(outcome["restart"]):
        if "error" in facts:
            return [facts["error"]]
        wrong += facts["problems"] + facts["problems_of_next_save"]
        wrong += [f"left over: {name}" for name in facts["debris"] + facts["debris_of_next_save"]]
        content = next((name for name, values in digests.items() if values[rank] == facts["digest"]), "unknown content")
        if content not in acceptable(outcome) or not content.startswith(f"step {facts['step']}"):
            wrong.append(f"rank {rank} resumed {content} under step {facts['step']}, not {acceptable(outcome)}")
    return wrong + check_survivors(outcome, errors)


def acceptable(outcome: dict[str, Any]) -> list[str]:
    """Return the states that a resume may find: saves that returned and visible checkpoints always count."""
    if "step 3 again" in outcome["saved"]:
        return ["step 3 again"]
    if "step 3" in outcome["saved"]:
        return ["step 3", "step 3 again"]
    return ["step 3"] if "checkpoint-3" in outcome["visible"] else ["step 2"]


def check_survivors(outcome: dict[str, Any], errors: tuple[str, ...]) -> list[str]:
    codes, killed = outcome["exit_codes"], outcome["point"]["rank"]
    survivors = [code for rank, code in enumerate(codes) if rank != killed]
    wrong = []
    if codes[killed] != KILLED or any(code != RAISED for code in survivors):
        wrong.append(f"exit codes {codes}")
    if survivors and not outcome["survivor_error"].startswith(errors):
        wrong.append(f"the survivor said {outcome['survivor_error']!r}")
    if outcome["survivor_seconds"] > 10:
        wrong.append(f"the survivor took {outcome['survivor_seconds']} seconds")
    return wrong


def check_report(report: dict[str, Any], errors: tuple[str, ...] = ERRORS) -> None:
    problems = []
    for outcome in report["outcomes"]:
        if not any(outcome["exit_codes"]) and outcome["point"]["operation"].startswith(RACED):
            continue  # The other rank created the directory each time.
        problems += [f"{outcome['point']}: {problem}" for problem in check_outcome(outcome, report["digests"], errors)]
    assert not problems, "\n".join(problems)


def test_kill_of_a_single_process_at_file_operations(fast_directory: Path) -> None:
    """Tries every fourth kill point to save time; `make kill-points` tries all of them."""
    every = int(os.environ.get("EVERY_KILL_POINT", "4"))
    report = kill_everywhere(1, "exchange", fast_directory, every)
    assert kinds_of(report, 0) >= ALL_KINDS | {"exchange"}
    assert len(report["outcomes"]) > 100 / every
    check_report(report)


def test_kill_of_either_of_two_ranks_at_file_operations(fast_directory: Path) -> None:
    """Tries every 24th kill point to save time; `make kill-points` tries all of them."""
    every = int(os.environ.get("EVERY_KILL_POINT", "24"))
    report = kill_everywhere(2, "exchange", fast_directory, every)
    if every == 1:
        # The ranks race to create the temporary directory, so one of them may have no mkdir.
        assert kinds_of(report, 0) >= ALL_KINDS - {"mkdir"} | {"exchange"}
    num_reached = sum(any(outcome["exit_codes"]) for outcome in report["outcomes"])
    assert num_reached >= len(report["outcomes"]) - 4
    assert kinds_of(report, 1) >= {"create", "pwrite", "fsync"}
    assert len(report["outcomes"]) > 120 / every
    check_report(report)


@long_search
def test_kill_of_either_of_two_ranks_that_shard_a_model(fast_directory: Path) -> None:
    """Tries every 32nd kill point to save time; `make kill-points` tries all of them."""
    every = int(os.environ.get("EVERY_KILL_POINT", "32"))
    report = kill_everywhere(2, "sharded", fast_directory, every)
    for rank in (0, 1):
        # Both ranks write weights and moments, and wait for slices of the other rank meanwhile.
        assert kinds_of(report, rank) >= {"create", "pwrite", "fsync"}
    assert len(report["outcomes"]) > 120 / every
    check_report(report)


def test_kill_of_a_single_process_during_background_saves(fast_directory: Path) -> None:
    """Tries every 24th kill point to save time; `make kill-points` tries all of them."""
    every = int(os.environ.get("EVERY_KILL_POINT", "24"))
    report = kill_everywhere(1, "background", fast_directory, every)
    check_report(report)


@pytest.mark.parametrize("variant", sampled(["background", "background-sharded"], ["background"]))
def test_kill_of_either_of_two_ranks_during_background_saves(fast_directory: Path, variant: str) -> None:
    """Tries a sample of kill points to save time; `make kill-points` tries all of them."""
    every = int(os.environ.get("EVERY_KILL_POINT", "48" if variant == "background" else "60"))
    report = kill_everywhere(2, variant, fast_directory, every)
    assert {outcome["point"]["rank"] for outcome in report["outcomes"]} == {0, 1}
    # Ranks of a sharded model may notice the death in a collective of the step that they compute meanwhile.
    check_report(report, (*ERRORS, "RuntimeError: [") if variant == "background-sharded" else ERRORS)


@long_search
def test_kill_during_a_replacement_without_atomic_exchange(fast_directory: Path) -> None:
    report = kill_everywhere(2, "renames", fast_directory)
    points = [(outcome["point"]["operation"], outcome["point"]["when"]) for outcome in report["outcomes"]]
    assert ("rename checkpoints/checkpoint-3 #1", "before") in points, "the replaced checkpoint is renamed first"
    gaps = [outcome for outcome in report["outcomes"] if "checkpoint-3" not in outcome["visible"]]
    assert len(gaps) >= 2, "between the two renames, the step has no checkpoint"
    check_report(report)


@pytest.mark.parametrize(("world_size", "variant"), FLAT_VARIANTS)
def test_kill_with_checkpoints_in_the_output_directory(fast_directory: Path, world_size: int, variant: str) -> None:
    """Tries every 32nd kill point to save time; `make kill-points` tries all of them."""
    every = int(os.environ.get("EVERY_KILL_POINT", "32"))
    report = kill_everywhere(world_size, f"flat-{variant}", fast_directory, every)
    operations = {outcome["point"]["operation"] for outcome in report["outcomes"]}
    assert any(operation.startswith("rename .tmp-checkpoint-3") for operation in operations) or variant == "renames"
    check_report(report)


def wait_for_file(path: Path) -> None:
    for _ in range(500):
        if path.exists():
            return
        time.sleep(0.01)


def save_while_a_bystander_dies(output_dir: str) -> None:
    """Kill rank 1 while rank 0 replaces a checkpoint; rank 2 notices first, and its clean-up is half done."""
    job = Job(output_dir)
    job.train()
    job.save()
    job.train(count=False)
    victim = Peers.world().gather(os.getpid())[1]
    noticed, committed = Path(output_dir) / "rank 2 has noticed", Path(output_dir) / "rank 0 is done"

    def fsync(descriptor: int, real: Callable[[int], None] = os.fsync) -> None:
        real(descriptor)
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("checkpoint_manifest.json"):
            os.kill(victim, signal.SIGKILL)
            wait_for_file(noticed)

    def unlink(path: str, *, dir_fd: int | None = None, real: Callable[..., None] = os.unlink) -> None:
        real(path, dir_fd=dir_fd)
        noticed.touch()
        wait_for_file(committed)

    patch = pytest.MonkeyPatch()
    if job.rank == 0:
        patch.setattr(os, "fsync", fsync)
    if job.rank == 2:
        patch.setattr(os, "unlink", unlink)
    try:
        job.save()
    finally:
        patch.undo()
        (committed if job.rank == 0 else noticed).touch()


def test_disconnected_rank_leaves_a_commit_in_progress_alone(tmp_path: Path) -> None:
    outcomes = outcomes_on_ranks(save_while_a_bystander_dies, 3, str(tmp_path))
    assert [outcome.error_type for outcome in outcomes] == ["CheckpointSaveError", "RankDied", "CheckpointSaveError"]
    store.recover(str(tmp_path / "checkpoints"))
    assert [one.path for one in store.find_checkpoints(str(tmp_path / "checkpoints"))] == [
        str(tmp_path / "checkpoints" / "checkpoint-1")
    ]
    assert store.verify_checkpoint(str(tmp_path / "checkpoints" / "checkpoint-1")) == []
    assert debris(tmp_path) == []
