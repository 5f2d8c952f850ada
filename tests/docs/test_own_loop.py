"""`examples/own_loop.py`: a killed and resumed run ends exactly like an uninterrupted one; the docs show it."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from forgather.ml.checkpoint import find_checkpoints
from forgather.ml.checkpoint.encoding.digest import state_digests
from forgather.ml.checkpoint.files.state_files import read_state
from forgather.ml.sharded_checkpoint import load_checkpoint

REPOSITORY = Path(__file__).parents[2]
PROGRAM = REPOSITORY / "examples" / "own_loop.py"
KILLED_AFTER_STEP = 18


def run(folder: Path, killed_after: int | None = None) -> list[str]:
    """Run the loop in a subprocess, kill it after step `killed_after` if given, and return the printed lines."""
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    lines = []
    with subprocess.Popen(
        [sys.executable, str(PROGRAM)], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.strip())
            if killed_after is not None and line.startswith(f"{killed_after} "):
                process.send_signal(signal.SIGKILL)
                break
    assert process.returncode == (0 if killed_after is None else -signal.SIGKILL)
    return lines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("own_loop")


@pytest.fixture(scope="module")
def straight(folder: Path) -> list[str]:
    return run(folder / "straight")


@pytest.fixture(scope="module")
def resumed(folder: Path) -> list[str]:
    run(folder / "killed", KILLED_AFTER_STEP)
    return run(folder / "killed")


def test_killed_loop_prints_the_same_losses_after_the_resume(straight: list[str], resumed: list[str]) -> None:
    assert straight[0] == "resumed from None" and len(straight) == 31
    step = int(resumed[0].rsplit("-", 1)[1])
    assert 0 < step <= KILLED_AFTER_STEP + 4
    assert resumed[1:] == straight[step + 1 :]


def test_killed_loop_ends_with_the_same_bits(folder: Path, straight: list[str], resumed: list[str]) -> None:
    ends = [folder / name / "own_loop" / "checkpoints" / "checkpoint-30" for name in ("straight", "killed")]
    first, second = (load_checkpoint(str(end)) for end in ends)
    assert first is not None and second is not None and first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    for name in ("optimizer_state.pt", "scheduler_state.pt"):
        digests = [state_digests(read_state(str(end / name))) for end in ends]
        assert digests[0] == digests[1], name
    # The loop seeds torch only.
    generators = [read_state(str(end / "rng_state_rank_0.pt"))["torch"] for end in ends]
    assert torch.equal(generators[0], generators[1])


def test_loop_keeps_the_newest_two_and_every_tenth_checkpoint(folder: Path, straight: list[str]) -> None:
    found = find_checkpoints(str(folder / "straight" / "own_loop" / "checkpoints"))
    assert [one.manifest.step for one in found] == [20, 28, 30]


def test_loop_is_short_and_shown_in_the_documentation() -> None:
    text = PROGRAM.read_text()
    assert len(text.splitlines()) < 40
    blocks = re.findall(r"^```python\n(.*?)^```", (REPOSITORY / "docs" / "checkpointing.md").read_text(), re.S | re.M)
    code = text.split('"""\n\n', 1)[1]
    assert code in blocks
