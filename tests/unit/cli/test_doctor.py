"""Command `forgather doctor`."""

import json
import sys
from pathlib import Path

import pytest

from forgather._extras import EXTRAS
from tests.unit.cli.program import call

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "4"}
SLURM_TASK = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "node1",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "0",
}


def test_doctor_tests_the_installation_in_a_directory_with_spaces(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "a directory with spaces"
    folder.mkdir()
    monkeypatch.chdir(folder)
    # Neither a launcher of another job nor a Slurm step with four tasks must be noticed.
    for name, value in (LAUNCHED | SLURM_TASK).items():
        monkeypatch.setenv(name, value)
    answer = call(capsys, "doctor")
    assert answer.code == 0, answer.output
    assert answer.output.count("passed (") == 2 and "resumed at step 4, the end is equal in every bit" in answer.output
    assert answer.output.splitlines()[-1].split(maxsplit=1) == ["verdict", "Forgather works here"]
    assert list(folder.iterdir()) == []


def test_doctor_prints_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = call(capsys, "doctor", "--json", "--no-self-test")
    content = json.loads(answer.output)
    assert (answer.code, content["schema"], content["healthy"]) == (0, "forgather.doctor/1", True)
    assert (content["problems"], content["self_test"], content["folder"]) == ([], [], str(tmp_path))
    assert [extra["extra"] for extra in content["extras"]] == list(EXTRAS)


def test_doctor_without_torch_says_so_and_exits_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    answer = call(capsys, "doctor")
    assert answer.code == 1 and answer.errors == ""
    assert "torch cannot be imported" in answer.output and "does not work here" in answer.output
    assert "passed" not in answer.output
