"""Hidden accelerators: neither a test nor the ranks that it starts find one."""

import os
import subprocess
import sys

import pytest
import torch

from tests.support.rank_nursery import REPOSITORY
from tests.support.ranks import run_on_ranks

REPORT = "import os, tests; print(repr(os.environ['CUDA_VISIBLE_DEVICES']))"


def visible_devices() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.mark.skipif(os.environ.get("REHEARSAL") == "1", reason="on the rehearsal device")
def test_cpu_suite_hides_devices_from_itself_and_its_ranks() -> None:
    assert not torch.cuda.is_available() and visible_devices() == ""
    assert run_on_ranks(visible_devices, 2) == ["", ""]


@pytest.mark.parametrize(("rehearsal", "shown"), [("0", "''"), ("1", "'0,1'")])
def test_devices_stay_visible_only_in_a_rehearsal(rehearsal: str, shown: str) -> None:
    # Without site packages there is no torch, which is not needed here.
    variables = {"CUDA_VISIBLE_DEVICES": "0,1", "REHEARSAL": rehearsal}
    command = [sys.executable, "-S", "-E", "-c", REPORT]
    result = subprocess.run(command, env=variables, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == shown
