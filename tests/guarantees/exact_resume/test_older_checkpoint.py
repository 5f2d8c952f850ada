"""Checkpoint format compatibility: a checkpoint of an earlier version loads and resumes exactly.

`tests/fixtures/checkpoint_of_format_1` was written at step 4 of 8 by the first version with this format.
`end_of_format_1.json` has the losses of that run. `tests/fixtures/checkpoint_before_house` was written at step 5 of 12, in
the middle of an epoch, by the last version before the modules moved.

Two CPUs round sums differently: MKL selects matrix product code for the CPU, so the final weights of a run differ in their
last bits. The runs here use a separate process with plain instructions, which give the same result on every CPU. In such a
process, the version before the move loaded and resumed both fixtures. `resumed_before_house.json` holds every leaf of its
state after the load and at the end, tensors as hashes.
"""

import json
import sys
from typing import Any

import pytest

from forgather.ml.checkpoint import verify_checkpoint
from tests.guarantees.exact_resume.test_golden_losses import PLAIN_INSTRUCTIONS
from tests.support.launch import RankProcess
from tests.support.older_runs import FIXTURES, RUNS

RUN_SECONDS = 240.0
BY_VERSION_BEFORE = json.loads((FIXTURES / "resumed_before_house.json").read_text())
COMPONENTS = {"model", "optimizer", "scheduler", "ema", "trainer", "dataset", "rng", "callbacks"}


@pytest.fixture(scope="module")
def present(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Results of this version for the fixtures."""
    folder = tmp_path_factory.mktemp("older")
    command = [sys.executable, "-m", "tests.support.older_runs", str(folder), str(folder / "result.json")]
    process = RankProcess(0, command, PLAIN_INSTRUCTIONS)
    code = process.wait(RUN_SECONDS)
    assert code == 0, process.output
    return json.loads((folder / "result.json").read_text())


def differences(expected: dict[str, dict[str, str]], found: dict[str, dict[str, str]]) -> list[str]:
    """Return the leaves that differ from the expected ones; additional leaves of a later version are allowed."""
    assert expected.keys() >= COMPONENTS and found.keys() >= COMPONENTS
    return [
        f"{component}.{path}: {found[component].get(path)} instead of {leaf}"
        for component, leaves in expected.items()
        for path, leaf in leaves.items()
        if found[component].get(path) != leaf
    ]


@pytest.mark.parametrize("name", RUNS)
def test_checkpoint_of_an_earlier_version_is_intact(name: str) -> None:
    assert verify_checkpoint(str(FIXTURES / name)) == []


@pytest.mark.parametrize("name", RUNS)
def test_components_of_an_earlier_version_load_bit_for_bit(present: Any, name: str) -> None:
    expected = BY_VERSION_BEFORE[name]["resumed"]["loaded"]
    assert differences(expected, present[name]["resumed"]["loaded"]) == []
    assert len(expected["optimizer"]) > 40 and "exp_avg" in str(list(expected["optimizer"]))


@pytest.mark.parametrize("name", RUNS)
def test_checkpoint_of_an_earlier_version_resumes_exactly(present: Any, name: str) -> None:
    expected, found = BY_VERSION_BEFORE[name]["resumed"], present[name]["resumed"]
    assert found["losses"] == expected["losses"]
    assert differences(expected["end"], found["end"]) == []


def test_resumed_earlier_checkpoint_ends_like_an_uninterrupted_run(present: Any) -> None:
    """Both halves used plain instructions: the first ran in the earlier version, the second in this one."""
    resumed, straight = (present["checkpoint_before_house"][kind] for kind in ("resumed", "straight"))
    assert resumed["losses"] == straight["losses"] and len(straight["losses"]) == 12
    assert differences(straight["end"], resumed["end"]) == []


def test_losses_match_the_version_that_wrote_format_1(present: Any) -> None:
    """The tolerance is for the first half, which ran on a CPU with other rounding."""
    end = json.loads((FIXTURES / "end_of_format_1.json").read_text())
    found = present["checkpoint_of_format_1"]["resumed"]
    assert found["losses"] == pytest.approx(end["losses"], rel=1e-6)
    assert set(found["end"]["model"]) == set(end["weights"])
