"""Failed saves raise the cause on every rank, and leave the previous checkpoint unchanged."""

import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forgather.ml.checkpoint import store
from tests.support.faults.job import debris
from tests.support.launch import CapturedProcess
from tests.support.rank_nursery import WarmProgram

Facts = list[dict[str, Any]]
RANKS = (0, 1)
# The needed and the available space in the message.
SPACE = re.compile(r"needs [\d,]+ bytes, [\d,]+ are available")


class Report:
    """Results of the scenarios in `tests.support.faults.save_failures`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        program = WarmProgram("tests.support.faults.save_failures", (str(directory), str(directory / "report.json")))
        process = CapturedProcess(program, {}, None, "save failures")
        assert process.wait(timeout=120) == 0, process.output
        self._facts: dict[str, Facts] = json.loads((directory / "report.json").read_text())

    def facts(self, scenario: str, troubled: int) -> Facts:
        return self._facts[f"{scenario} on rank {troubled}"]

    def output_dir(self, scenario: str, troubled: int) -> Path:
        return self._directory / f"{scenario} on rank {troubled}" / "output"


@pytest.fixture(scope="module")
def report() -> Iterator[Report]:
    """Report in a directory that an unprivileged user can reach, unlike pytest's directories."""
    with tempfile.TemporaryDirectory(prefix="save_failures_") as directory:
        os.chmod(directory, 0o755)
        yield Report(Path(directory))


def check_failed_save(report: Report, scenario: str, troubled: int, cause: str) -> None:
    """Assert that every rank named the failing rank and the cause in time, and that only the old checkpoint exists."""
    for facts in report.facts(scenario, troubled):
        assert facts["error"] == "CheckpointSaveError"
        assert f"rank {troubled} failed" in facts["message"]
        assert re.search(cause, facts["message"]), facts["message"]
        assert facts["seconds"] < 10
        assert facts["debris"] == []
    check_previous(report.output_dir(scenario, troubled))


def check_previous(output_dir: Path) -> None:
    root = output_dir / "checkpoints"
    assert [found.path for found in store.find_checkpoints(str(root))] == [str(root / "checkpoint-1")]
    assert store.verify_checkpoint(str(root / "checkpoint-1")) == []
    assert debris(output_dir) == []


@pytest.mark.parametrize("troubled", RANKS)
def test_full_disk_is_detected_before_any_write(report: Report, troubled: int) -> None:
    if not report.facts("full_disk", troubled)[troubled]["mounted"]:
        pytest.skip("needs permission to mount a small disk")
    check_failed_save(report, "full_disk", troubled, "while preparing the checkpoint directory.*Not enough space")
    for facts in report.facts("full_disk", troubled):
        assert SPACE.search(facts["message"]), facts["message"]
        assert "524,288 are available" in facts["message"]


@pytest.mark.parametrize("troubled", RANKS)
def test_disk_that_fills_up_during_the_save_fails_it(report: Report, troubled: int) -> None:
    if not report.facts("disk_fills_up", troubled)[troubled]["mounted"]:
        pytest.skip("needs permission to mount a small disk")
    check_failed_save(report, "disk_fills_up", troubled, r"No space left on device: \S.*_state.*\.pt")
    for facts in report.facts("disk_fills_up", troubled):
        assert SPACE.search(facts["message"]), facts["message"]


@pytest.mark.parametrize("troubled", RANKS)
def test_disk_that_fills_up_during_a_background_save_fails_it(report: Report, troubled: int) -> None:
    if not report.facts("background_disk_fills_up", troubled)[troubled]["mounted"]:
        pytest.skip("needs permission to mount a small disk")
    check_failed_save(report, "background_disk_fills_up", troubled, r"No space left on device: \S.*_state.*\.pt")


@pytest.mark.parametrize("troubled", RANKS)
def test_training_continues_after_a_full_disk_in_the_background(report: Report, troubled: int) -> None:
    scenario = "background_disk_fills_up_with_a_warning"
    if not report.facts(scenario, troubled)[troubled]["mounted"]:
        pytest.skip("needs permission to mount a small disk")
    for facts in report.facts(scenario, troubled):
        assert (facts["error"], facts["value"], facts["num_save_errors"]) == (None, "", 1)
        assert facts["debris"] == []
    check_previous(report.output_dir(scenario, troubled))


@pytest.mark.parametrize("troubled", RANKS)
def test_partial_write_fails_the_save(report: Report, troubled: int) -> None:
    check_failed_save(report, "file_too_large", troubled, r"File too large: \S.*_state.*\.pt")


@pytest.mark.parametrize("troubled", RANKS)
def test_read_only_disk_on_one_rank_fails_the_save(report: Report, troubled: int) -> None:
    if not report.facts("read_only_disk", troubled)[troubled]["mounted"]:
        pytest.skip("needs permission to mount a directory read-only")
    check_failed_save(report, "read_only_disk", troubled, "Read-only file system: .*checkpoint-2")


@pytest.mark.parametrize("troubled", RANKS)
def test_missing_permission_on_one_rank_fails_the_save(report: Report, troubled: int) -> None:
    if not report.facts("no_permission", troubled)[troubled]["changed_user"]:
        pytest.skip("needs root to drop privileges")
    check_failed_save(report, "no_permission", troubled, "Permission denied: .*checkpoint-2")


@pytest.mark.parametrize("troubled", RANKS)
def test_state_dict_error_on_one_rank_fails_the_save(report: Report, troubled: int) -> None:
    check_failed_save(report, "state_that_cannot_be_had", troubled, "while collecting state: AttributeError")


@pytest.mark.parametrize("troubled", RANKS)
def test_on_save_error_warn_continues_and_the_next_save_succeeds(report: Report, troubled: int) -> None:
    for facts in report.facts("warned_only", troubled):
        assert facts["error"] is None
        assert facts["value"] == ""
        assert facts["num_save_errors"] == 1
        assert sorted(facts["names"]) == ["checkpoint-1", "checkpoint-3"]
        assert store.verify_checkpoint(facts["next"]) == []
        assert facts["debris"] == []


def test_unwritable_output_directory_is_rejected_at_start(report: Report) -> None:
    facts_by_rank = report.facts("unwritable_output_dir", 0)
    assert facts_by_rank[0]["is_possible"]
    for facts in facts_by_rank:
        assert facts["error"] == "CheckpointError"
        assert "rank 0 failed while locking the output directory" in facts["message"]
        assert "Permission denied" in facts["message"]
        assert "choose another output_dir" in facts["message"]
        assert facts["seconds"] < 10


def test_second_job_in_one_output_directory_is_rejected_on_all_ranks(report: Report) -> None:
    for facts in report.facts("directory_in_use", 0):
        assert facts["error"] == "OutputDirLockedError"
        assert f"process {facts['holder']} on host {facts['host']}" in facts["message"]
        assert facts["seconds"] < 10
        assert facts["after"] is None, "the directory is free once the holder is dead"


def test_file_with_a_checkpoint_name_is_kept_and_named(report: Report) -> None:
    for facts in report.facts("file_in_place_of_a_checkpoint", 0):
        assert facts["error"] == "CheckpointSaveError"
        assert re.search("checkpoint-2 exists and is not a directory", facts["message"])
        assert "bytes" not in facts["message"].splitlines()[0], "the error is not about space"
        for attempt in (facts["load"], facts["resolve"]):
            assert attempt["error"] == "CheckpointNotFoundError"
            assert "a file, not a checkpoint directory" in attempt["message"]
        assert facts["newest"].endswith("checkpoint-1")
        assert facts["debris"] == []
    path = report.output_dir("file_in_place_of_a_checkpoint", 0) / "checkpoints" / "checkpoint-2"
    assert path.read_text() == "not a checkpoint"
