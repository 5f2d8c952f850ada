"""Files for contributors: they are valid, and name commands and paths that exist."""

import os
import re
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).parents[1]
YAML_FILES = [".pre-commit-config.yaml", "CITATION.cff", ".github/workflows/ci.yml"]
YAML_FILES += sorted(
    str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / ".github/ISSUE_TEMPLATE").glob("*.yml")
)


@pytest.mark.parametrize("name", YAML_FILES)
def test_file_is_a_yaml_mapping(name: str) -> None:
    assert isinstance(yaml.safe_load((REPOSITORY / name).read_text()), dict)


def test_workflow_runs_the_checks_of_ci() -> None:
    steps = yaml.safe_load((REPOSITORY / ".github/workflows/ci.yml").read_text())["jobs"]["checks"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == [".ci/run"]
    assert os.access(REPOSITORY / ".ci/run", os.X_OK)


def test_hooks_need_no_other_host() -> None:
    repositories = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())["repos"]
    assert [one["repo"] for one in repositories] == ["local"]
    assert {hook["language"] for one in repositories for hook in one["hooks"]} == {"system"}


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/installation.md", ".pre-commit-config.yaml"])
def test_make_targets_exist(name: str) -> None:
    rules = set(re.findall(r"^([a-z][\w-]*):", (REPOSITORY / "Makefile").read_text(), flags=re.MULTILINE))
    asked = set(re.findall(r"\bmake ([a-z][\w-]*)", (REPOSITORY / name).read_text()))
    assert asked and asked <= rules


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_links_have_targets(name: str) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (REPOSITORY / name).read_text())
    for target in targets:
        assert target.startswith("http") or (REPOSITORY / target).exists(), target
