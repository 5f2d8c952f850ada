"""Memory plan of background saves: sizes, shares, the default, and the explanation in the log."""

import logging
import re
from pathlib import Path

import pytest

from forgather.ml.checkpoint.background import memory_plan
from forgather.ml.checkpoint.background.memory_plan import (
    MemoryNeed,
    checked_async_save_memory,
    free_memory,
    plan_memory,
)
from tests.support.faults.job import Job

GIB = 2**30


@pytest.mark.parametrize("value", ["4GiB", "500MB", "1.5 gib", "12kb", "1B", 0.25, 1, 1e-6, None])
def test_sizes_and_shares_are_accepted(value: str | float | None) -> None:
    assert checked_async_save_memory(value) == value


def test_share_from_the_command_line_becomes_a_number() -> None:
    assert checked_async_save_memory("0.5") == 0.5


@pytest.mark.parametrize(
    "value", ["", "4", "4 apples", "GiB", "-4GiB", "0B", "0.1B", "nan", 0, -0.5, 1.5, True, "1.5", "1.2.3"]
)
def test_other_values_are_refused(value: str | float) -> None:
    with pytest.raises(ValueError, match=r"async_save_memory=.*'4GiB'"):
        checked_async_save_memory(value)


@pytest.mark.parametrize(
    "size, num_bytes", [("4GiB", 4 * GIB), ("500MB", 500 * 10**6), ("1.5 gib", 3 * GIB // 2), ("12kb", 12_000)]
)
def test_size_applies_to_each_rank(size: str, num_bytes: int) -> None:
    needs = [MemoryNeed(8 * GIB, 100 * GIB), MemoryNeed(0, 100 * GIB)]
    for position in (0, 1):
        plan = plan_memory(size, needs, position)
        assert plan.limit == num_bytes
        assert f"async_save_memory={size!r} per rank" in plan.reason


def test_share_is_divided_by_need_and_uses_the_smallest_measurement() -> None:
    needs = [MemoryNeed(6 * GIB, 40 * GIB), MemoryNeed(2 * GIB, 32 * GIB), MemoryNeed(0, 48 * GIB)]
    plans = [plan_memory(0.5, needs, position) for position in range(3)]
    assert [plan.limit for plan in plans] == [12 * GIB, 4 * GIB, 0]
    assert "async_save_memory=0.5: 50% of 32.0 GiB free memory of this node, 3 rank(s)" in plans[0].reason


def test_default_is_a_quarter_of_the_free_memory() -> None:
    plan = plan_memory(None, [MemoryNeed(3 * GIB, 16 * GIB)], 0)
    assert plan.limit == 4 * GIB
    assert plan.reason == "default: 25% of 16.0 GiB free memory of this node, 1 rank(s)"
    assert plan_memory(None, [MemoryNeed(0, 16 * GIB)], 0).limit == 0


def test_free_memory_is_measured() -> None:
    assert 0 < free_memory() < 2**50


@pytest.mark.parametrize(
    "line, folder, files",
    [
        ("0::/slurm/job_7/step_0", "slurm/job_7", ("memory.max", "memory.current")),
        ("0::/", "", ("memory.max", "memory.current")),
        ("4:cpu,memory:/slurm/job_7", "memory/slurm/job_7", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
        ("4:memory:/host/docker/ab", "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    ],
)
def test_limit_of_a_scheduler_or_container_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, folder: str, files: tuple[str, str]
) -> None:
    group = tmp_path / "groups" / folder
    group.mkdir(parents=True)
    for name, text in zip((*files, "memory.stat"), ("3000000", "2500000", "anon 7\ninactive_file 1000\n"), strict=True):
        (group / name).write_text(text)
    (tmp_path / "own").write_text(f"{line}\n9:pids:/\n")
    monkeypatch.setattr(memory_plan, "_CGROUP", str(tmp_path / "groups"))
    monkeypatch.setattr(memory_plan, "_OWN_CGROUPS", str(tmp_path / "own"))
    assert free_memory() == 501_000


@pytest.mark.parametrize(
    "memory, level, text",
    [
        (None, logging.INFO, "copy the state of this rank in full.*default: 25% of"),
        ("20KB", logging.WARNING, "in pieces: 19.5 KiB of .* fit the limit .async_save_memory='20KB' per rank"),
    ],
)
def test_log_states_choice_and_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, memory: str | None, level: int, text: str
) -> None:
    job = Job(tmp_path, async_save=True, async_save_memory=memory)
    job.train()
    with caplog.at_level(logging.INFO, logger="forgather"):
        job.save()
    job.manager.close()
    [record] = [one for one in caplog.records if "copy the state of this rank" in one.message]
    assert record.levelno == level
    assert re.search(text, record.message)
