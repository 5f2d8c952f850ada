"""A checkpoint that was tampered with loads as it was, or is refused with an error that names the file."""

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

NUM_EXAMPLES = 500
# Under a minute on a machine with nothing else to do; here others work too.
LIMIT_SECONDS = 240
# Memory in large pages: a process with fewer of them is forked in a third of the time.
QUICK_TO_FORK = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "PYTHONMALLOC": "malloc"}
ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """All examples, in a process of their own: one that forks must have no threads, which the tests' own may have."""
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
    # One that hangs is enough to fail, and takes its full time.
    command += ["--max-hangs", "3"]
    environment = {**os.environ, **QUICK_TO_FORK, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )
    assert (directory / "results.json").exists(), done.stdout + done.stderr
    yield {**json.loads((directory / "results.json").read_text()), "report": done.stdout}
    shutil.rmtree(directory)


def test_every_mutation_loads_equal_or_is_refused_by_name(results: dict[str, Any]) -> None:
    assert not results["gave_up"], results["report"]
    assert results["failures"] == [], results["report"]


def test_all_kinds_of_mutations_were_tried(results: dict[str, Any]) -> None:
    assert results["examples"] >= NUM_EXAMPLES
    assert results["kinds"].keys() == KINDS.keys()


def test_misbehaviour_is_noticed(results: dict[str, Any]) -> None:
    assert {outcome: outcome for outcome in results["noticed"]} == results["noticed"]
    assert results["is_pristine"], "an example reached the directories that are copied"


def test_mutations_are_noticed_in_every_way(results: dict[str, Any]) -> None:
    """Most are refused; some are harmless, or data: a fuzzer that sees only one outcome would not look closely."""
    outcomes = results["outcomes"]
    assert outcomes["refused"] > NUM_EXAMPLES / 2
    assert outcomes["equal"] > NUM_EXAMPLES / 50
    assert outcomes["other data"] > NUM_EXAMPLES / 50


def test_sealing_leaves_a_sound_checkpoint_as_it_was(tmp_path: Path) -> None:
    """Else all sealed mutations would be refused for the seal."""
    from tests.support.faults.job import Job

    job = Job(tmp_path)
    job.train()
    path = Path(job.save())
    job.manager.close()
    before = json.loads((path / MANIFEST).read_bytes())
    for name in ("trainer_state.pt", MANIFEST):
        seal(path, name)
        assert json.loads((path / MANIFEST).read_bytes()) == before, name
