"""The Makefile checks the Python version before it sets anything up."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
TARGETS = ["", "setup", "test", "lock", "test-torch VERSION=2.15.0"]


def run_make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    for name in ("Makefile", "requirements.lock", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, folder)
    # Hide the make that may have started these tests.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *words], cwd=folder, env=environment, capture_output=True, text=True, check=False)


def old_python(folder: Path) -> Path:
    """Write a fake Python that reports version 3.9.2."""
    path = folder / "python3.9"
    path.write_text(
        f'#!/bin/sh\nexec {sys.executable} -c "import sys; sys.version_info = (3, 9, 2); exec(sys.argv[1])" "$2"\n'
    )
    path.chmod(0o755)
    return path


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("target", TARGETS)
def test_old_python_is_rejected_in_one_line(tmp_path: Path, target: str) -> None:
    python = old_python(tmp_path)
    done = run_make(tmp_path, *target.split(), f"PYTHON={python}")
    assert done.returncode != 0 and not list(tmp_path.glob(".venv*"))
    (line,) = (done.stdout + done.stderr).splitlines()
    assert f"{python} is Python 3.9.2. Forgather needs Python 3.11 or newer" in line
    assert "make PYTHON=python3.12" in line


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["setup", "PYTHON=python3.99"], "python3.99 does not run. Forgather needs Python 3.11 or newer"),
        (["test-torch"], "Which torch? Give its version: make test-torch VERSION=2.15.0"),
    ],
)
def test_missing_python_or_version_is_named(tmp_path: Path, words: list[str], message: str) -> None:
    done = run_make(tmp_path, *words)
    assert done.returncode != 0 and message in done.stderr and not list(tmp_path.glob(".venv*"))


def test_lock_file_has_hashes_for_all_but_torch() -> None:
    entries = (REPOSITORY / "requirements.lock").read_text().replace("\\\n", "").splitlines()[1:]
    names = [entry.partition("==")[0] for entry in entries]
    assert len(names) > 50 and "torch" not in names
    assert [entry for entry in entries if "--hash=sha256:" not in entry] == []
