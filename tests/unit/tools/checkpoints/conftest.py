"""Runs of every trainer, trained once for all tests of this folder."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.tools.checkpoints.runs import trained


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Function that returns the output directory of a trainer's run, which must not be changed."""
    return functools.cache(lambda name: trained(name, tmp_path_factory.mktemp("runs") / name))


@pytest.fixture
def run(runs: Callable[[str], Path], tmp_path: Path) -> Path:
    """Copy of the run on one device, which a test may damage."""
    return Path(shutil.copytree(runs("single"), tmp_path / "out"))
