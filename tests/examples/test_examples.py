"""Programs in examples/: the first run prints the expected output, and a second start resumes.

`WRITE_EXPECTED=1 make test-examples` writes the files with the expected output instead of comparing them.
"""

import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_SECONDS = 300
# Losses depend on the text of the installed Python and on the kernels of the processor.
TOLERANCE = 0.15

# The longest first, so that they do not run alone at the end.
RESUMED = {
    "ray_train": "resumed at step 100",
    "hybrid": "resumed at step 40",
    "custom_trainer": "resumed at step 60",
    "fsdp2": "resumed at step 60",
    "pipeline": "resumed at step 60",
    "ddp": "resumed at step 100",
    "continued_pretraining": "resumed at step 60",
    "hf_script": "resumed at step 90",
    "image_classification": "resumed at step 120",
    "single_device": "resumed at step 200",
    "own_loop": "resumed from own_loop/checkpoints/checkpoint-30",
    "checkpoint_demo": "3. The restarted job finds step 3, verifies it, and resumes",
}
# This program kills and restarts its own ranks, in a temporary directory.
RESUMES_BY_ITSELF = ("checkpoint_demo",)
# Packages that not every environment has.
NEEDED = {"ray_train": "ray"}
# Speed, time, gradient norms and places differ from run to run; fingerprints of states differ between machines.
VOLATILE = re.compile(
    r"\s+[\d.]+[kM]? tok/s|\s+\d+:\d\d(:\d\d)? left|in \d+:\d\d|in [\d.]+ s\b|grad \S+|^(output|devices) .*"
    r"|state [0-9a-f]{16}|^\s*rank \d ended: .*|^[│┃┏┡└].*",
    flags=re.MULTILINE,
)
NUMBER = re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?")


# Ray puts the name of the process before each line of a worker.
WORKER = re.compile(r"^(?:\x1b\[\d+m)*\(RayTrainWorker pid=\d+\)(?:\x1b\[\d+m)* ", flags=re.MULTILINE)


def command_of(name: str) -> list[str]:
    """Return the first command in the docstring of an example."""
    text = (EXAMPLES / f"{name}.py").read_text()
    found = re.search(rf"((?:python|torchrun)[^\n`]* )examples/{name}\.py", text)
    # own_loop.py is shown in the documentation without a command.
    words = shlex.split(found[1]) if found else ["python"]
    launcher = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}[words[0]]
    return [*launcher, *words[1:], str(EXAMPLES / f"{name}.py")]


def run(name: str, folder: Path) -> str:
    """Run an example in a folder, without accelerators, and return what it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    command, limit = command_of(name), TIMEOUT_SECONDS
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return WORKER.sub("", done.stdout).replace(f"{folder}/", "")


def parts_of(output: str) -> tuple[list[str], list[float]]:
    """Return the lines without volatile parts and decimal numbers, and these numbers."""
    kept = VOLATILE.sub("", output)
    lines = [" ".join(NUMBER.sub("#", line).split()) for line in kept.splitlines()]
    return [line for line in lines if line], [float(number) for number in NUMBER.findall(kept)]


@pytest.mark.parametrize("name", RESUMED)
def test_example_prints_the_expected_output_and_resumes(name: str, tmp_path: Path) -> None:
    if name in NEEDED:
        pytest.importorskip(NEEDED[name])
    printed, expected_path = run(name, tmp_path), EXAMPLES / f"{name}.expected.txt"
    if os.environ.get("WRITE_EXPECTED") == "1":
        expected_path.write_text("".join(f"{line.rstrip()}\n" for line in printed.splitlines()))
    (lines, numbers), (expected_lines, expected_numbers) = parts_of(printed), parts_of(expected_path.read_text())
    if name in RESUMES_BY_ITSELF:
        # Where a killed rank leaves the other one, and the words of its error, differ from run to run.
        assert RESUMED[name] in printed
        return
    assert lines == expected_lines
    close = [
        math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=0.05)
        for one, other in zip(numbers, expected_numbers, strict=True)
    ]
    assert all(close), f"the numbers differ from {expected_path}:\n{printed}"
    assert RESUMED[name] in run(name, tmp_path)


def test_every_example_is_run_and_listed() -> None:
    programs = {path.stem for path in EXAMPLES.glob("*.py")}
    listed = re.findall(r"^\| \[(\w+)\.py\]", (EXAMPLES / "README.md").read_text(), flags=re.MULTILINE)
    assert programs == RESUMED.keys() == set(listed)
