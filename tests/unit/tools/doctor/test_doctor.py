"""Diagnosis of an installation: its self-test trains, kills and resumes for real, and can fail."""

import importlib.metadata
import os
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import forgather
from forgather.tools.doctor import Diagnosis, inspect_environment, self_test
from forgather.tools.doctor.environment import Space
from forgather.tools.doctor.packages import REQUIRED, RequiredPackage, required_packages

# Runs at the start of each Python process. The second fork is the resumed run, which then trains without dropout.
WITHOUT_DROPOUT = """
import os
forks = []

def in_child():
    if len(forks) == 2:
        import torch
        torch.nn.functional.dropout = lambda x, *rest: x

os.register_at_fork(before=lambda: forks.append(1), after_in_child=in_child)
"""


def test_self_test_notices_a_resume_with_other_bits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "sitecustomize.py").write_text(WITHOUT_DROPOUT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "code"), prepend=os.pathsep)
    resume, ranks = self_test(str(tmp_path))
    assert not resume.passed and resume.detail == "the resumed run ended with other bits than the uninterrupted one."
    assert ranks.passed
    assert [path.name for path in tmp_path.iterdir()] == ["code"]


def test_self_test_that_cannot_import_torch_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libfoo.so.1: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    checks = tuple(self_test(str(tmp_path)))
    assert [check.passed for check in checks] == [False, False]
    result = Diagnosis(inspect_environment(str(tmp_path)), checks)
    assert not result.is_healthy and "libfoo.so.1: cannot open shared object file" in result.problems[0]


def test_environment_lists_versions_and_resources(tmp_path: Path) -> None:
    environment = inspect_environment(str(tmp_path))
    assert environment.problems == ()
    assert (environment.forgather, environment.folder) == (forgather.__version__, str(tmp_path))
    assert {one.name: one.version for one in environment.packages} == {
        name: importlib.metadata.version(name) for name in REQUIRED
    }
    assert "gloo" in environment.torch.backends
    spaces = [space for space in (environment.disk, environment.memory, environment.shared_memory) if space is not None]
    assert len(spaces) >= 2 and all(0 <= space.free <= space.total for space in spaces)


def test_broken_torch_is_a_problem_and_not_an_exception(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    (problem,) = inspect_environment(str(tmp_path)).problems
    assert problem.startswith("torch cannot be imported: ")


@pytest.mark.parametrize(
    ("version", "is_permitted", "problem"),
    [
        ("2.13.0", True, None),
        (None, False, "The package torch is not installed: pip install 'torch>=2.13'."),
        ("2.9.0", False, "torch 2.9.0 does not fit, Forgather needs torch>=2.13: pip install 'torch>=2.13'."),
    ],
)
def test_package_outside_of_its_range_is_a_problem(
    version: str | None, is_permitted: bool, problem: str | None
) -> None:
    assert RequiredPackage("torch", version, ">=2.13", is_permitted).problem == problem


def test_ranges_are_known_without_packaging(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = required_packages()
    monkeypatch.setitem(sys.modules, "packaging", None)
    monkeypatch.setitem(sys.modules, "packaging.specifiers", None)
    assert required_packages() == whole
    wanted = map(Requirement, importlib.metadata.requires("forgather") or [])
    assert {Requirement(one.name + one.permitted) for one in whole} == {one for one in wanted if one.marker is None}


def test_small_shared_memory_and_disk_are_warnings(tmp_path: Path) -> None:
    from dataclasses import replace

    little = Space(2**20, 64 * 2**20)
    environment = replace(inspect_environment(str(tmp_path)), shared_memory=little, disk=little)
    assert environment.problems == ()
    text = " ".join(environment.warnings)
    assert "--shm-size" in text and "less than 1 GiB left for checkpoints" in text
