"""Fuzzing: a tampered checkpoint loads unchanged, or the error names the file."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.guarantees.hostile_checkpoints.fuzz.mutations import KINDS
from tests.guarantees.hostile_checkpoints.fuzz.place import MANIFEST
from tests.guarantees.hostile_checkpoints.fuzz.sealing import seal

NUM_EXAMPLES = 80
# Takes under a minute on an idle machine, but test machines are busy.
LIMIT_SECONDS = 240
# Huge pages: a process with fewer pages forks in a third of the time.
QUICK_TO_FORK = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "PYTHONMALLOC": "malloc"}
ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Results of all examples. They run in a separate process, because a process that forks must have no threads."""
    directory = tmp_path_factory.mktemp("fuzz")
    command = [
        sys.executable,
        "-m",
        "tests.guarantees.hostile_checkpoints.fuzz",
        "--examples",
        str(NUM_EXAMPLES),
        "--json",
        "results.json",
    ]
    # One hang is enough to fail, and each takes its full time limit.
    command += ["--max-hangs", "3"]
    environment = {**os.environ, **QUICK_TO_FORK, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )
    assert (directory / "results.json").exists(), done.stdout + done.stderr
    yield {**json.loads((directory / "results.json").read_text()), "report": done.stdout}
    shutil.rmtree(directory)


def test_every_mutation_loads_equal_or_is_rejected_by_name(results: dict[str, Any]) -> None:
    assert not results["gave_up"], results["report"]
    assert results["failures"] == [], results["report"]


def test_all_kinds_of_mutations_were_tried(results: dict[str, Any]) -> None:
    assert results["examples"] >= NUM_EXAMPLES
    assert results["kinds"].keys() == KINDS.keys()


def test_fuzzer_detects_misbehaving_children(results: dict[str, Any]) -> None:
    assert {outcome: outcome for outcome in results["noticed"]} == results["noticed"]
    assert results["is_pristine"], "an example reached the directories that are copied"


def test_every_valid_outcome_occurs(results: dict[str, Any]) -> None:
    """Most mutations are rejected; some are harmless or other data. A fuzzer with a single outcome checks nothing."""
    outcomes = results["outcomes"]
    assert outcomes["refused"] > NUM_EXAMPLES / 2
    assert outcomes["equal"] > NUM_EXAMPLES / 50
    assert outcomes["other data"] > NUM_EXAMPLES / 50


def test_sealing_leaves_a_valid_checkpoint_unchanged(tmp_path: Path) -> None:
    """Otherwise every sealed mutation would be rejected for its seal."""
    from tests.support.faults.job import Job

    job = Job(tmp_path)
    job.train()
    path = Path(job.save())
    job.manager.close()
    before = json.loads((path / MANIFEST).read_bytes())
    for name in ("trainer_state.pt", MANIFEST):
        seal(path, name)
        assert json.loads((path / MANIFEST).read_bytes()) == before, name
