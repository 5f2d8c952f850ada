"""Checkpoint format compatibility: a checkpoint of an earlier version loads and resumes exactly.

`tests/fixtures/checkpoint_of_format_1` was written at step 4 of 8 by the first version with this format.
`end_of_format_1.json` has the losses of that run. `tests/fixtures/checkpoint_before_house` was written at step 5 of 12, in
the middle of an epoch, by the last version before the modules moved.

In a separate process, the version before the move loaded and resumed both fixtures. `resumed_before_house.json` holds every
leaf of its state after the load and at the end; `resumed_before_house.safetensors` holds its tensors at the end.

Loaded state is compared bit for bit. CPUs round sums, square roots and hyperbolic tangents differently, because MKL
selects code for the CPU, so arithmetic after the load is compared within a few units of the last place. Counters, data
position and random state at the end must be equal.
"""

import json
import math
import operator
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from forgather.ml.checkpoint import verify_checkpoint
from tests.guarantees.exact_resume.test_golden_losses import PLAIN_INSTRUCTIONS
from tests.support.launch import RankProcess
from tests.support.older_runs import FIXTURES, RUNS

RUN_SECONDS = 240.0
COMPONENTS = {"model", "optimizer", "scheduler", "ema", "trainer", "dataset", "rng", "callbacks"}
# A wrong random number, moment or learning rate changes weights by 1e-4 or more.
RELATIVE, ABSOLUTE = 1e-5, 2e-6

Leaves = Mapping[str, Mapping[str, str]]


class Results(NamedTuple):
    """Described states by fixture and run, and tensors at the end by fixture, run and path."""

    described: Any
    tensors: dict[str, Tensor]


BY_VERSION_BEFORE = Results(
    json.loads((FIXTURES / "resumed_before_house.json").read_text()),
    load_file(FIXTURES / "resumed_before_house.safetensors"),
)


@pytest.fixture(scope="module")
def present(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Results of this version for the fixtures."""
    folder = tmp_path_factory.mktemp("older")
    result = folder / "result.json"
    process = RankProcess(
        0, [sys.executable, "-m", "tests.support.older_runs", str(folder), str(result)], PLAIN_INSTRUCTIONS
    )
    code = process.wait(RUN_SECONDS)
    assert code == 0, process.output
    return Results(json.loads(result.read_text()), load_file(result.with_suffix(".safetensors")))


def differences(
    expected: Leaves, found: Leaves, are_equal: Callable[[str, str | None], bool] = operator.eq
) -> list[str]:
    """Return the leaves that differ from the expected ones; additional leaves of a later version are allowed."""
    assert expected.keys() >= COMPONENTS and found.keys() >= COMPONENTS
    return [
        f"{component}.{path}: {found[component].get(path)} instead of {leaf}"
        for component, leaves in expected.items()
        for path, leaf in leaves.items()
        if not are_equal(leaf, found[component].get(path))
    ]


def are_equal_but_for_rounding(expected: str, found: str | None) -> bool:
    """Compare two leaves. Floating-point tensors are compared by `assert_close`, so equal types are enough here."""
    if found is None or not expected.startswith(("0x", "-0x", "torch.float")):
        return expected == found
    if expected.startswith("torch.float"):
        return expected.rsplit(maxsplit=1)[0] == found.rsplit(maxsplit=1)[0]
    return math.isclose(float.fromhex(expected), float.fromhex(found), rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def assert_close(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    assert len(expected) >= 10 and expected.keys() <= found.keys()
    for path, tensor in expected.items():
        torch.testing.assert_close(
            found[path], tensor, rtol=RELATIVE, atol=ABSOLUTE, msg=lambda text, path=path: f"{path}: {text}"
        )


def at_end_of(results: Results, name: str, kind: str) -> dict[str, Tensor]:
    prefix = f"{name}/{kind}/"
    return {path.removeprefix(prefix): one for path, one in results.tensors.items() if path.startswith(prefix)}


@pytest.mark.parametrize("name", RUNS)
def test_checkpoint_of_an_earlier_version_is_intact(name: str) -> None:
    assert verify_checkpoint(str(FIXTURES / name)) == []


@pytest.mark.parametrize("name", RUNS)
def test_components_of_an_earlier_version_load_bit_for_bit(present: Results, name: str) -> None:
    expected = BY_VERSION_BEFORE.described[name]["resumed"]["loaded"]
    assert differences(expected, present.described[name]["resumed"]["loaded"]) == []
    assert len(expected["optimizer"]) > 40 and "exp_avg" in str(list(expected["optimizer"]))


@pytest.mark.parametrize("name", RUNS)
def test_checkpoint_of_an_earlier_version_resumes_like_that_version(present: Results, name: str) -> None:
    expected, found = BY_VERSION_BEFORE.described[name]["resumed"], present.described[name]["resumed"]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert differences(expected["end"], found["end"], are_equal_but_for_rounding) == []
    assert_close(at_end_of(BY_VERSION_BEFORE, name, "resumed"), at_end_of(present, name, "resumed"))


def test_resumed_earlier_checkpoint_ends_like_an_uninterrupted_run(present: Results) -> None:
    """The first half of the resumed run was trained by the earlier version, the second half by this one."""
    name = "checkpoint_before_house"
    resumed, straight = (present.described[name][kind] for kind in ("resumed", "straight"))
    assert resumed["losses"] == pytest.approx(straight["losses"], rel=1e-6) and len(straight["losses"]) == 12
    assert differences(straight["end"], resumed["end"], are_equal_but_for_rounding) == []
    assert_close(at_end_of(present, name, "straight"), at_end_of(present, name, "resumed"))


def test_losses_match_the_version_that_wrote_format_1(present: Results) -> None:
    """The tolerance is for the first half, which ran on a CPU with other rounding."""
    end = json.loads((FIXTURES / "end_of_format_1.json").read_text())
    found = present.described["checkpoint_of_format_1"]["resumed"]
    assert found["losses"] == pytest.approx(end["losses"], rel=1e-6)
    assert set(found["end"]["model"]) == set(end["weights"])
