"""Public interface of `forgather.ml.checkpoint`: cheap to import, and independent of trainers."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import forgather.ml.checkpoint as checkpoint

FOLDER = Path(checkpoint.__file__).parent


def test_importing_the_package_imports_no_torch() -> None:
    program = "import sys, forgather.ml.checkpoint; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("name", checkpoint.__all__)
def test_every_public_name_exists_and_is_documented(name: str) -> None:
    value = getattr(checkpoint, name)
    assert name == "StateDict" or value.__doc__
    assert sorted(checkpoint.__all__) == sorted(checkpoint._HOMES)


def test_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="CheckpointManger"):
        checkpoint.CheckpointManger  # noqa: B018


def imported_modules(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda path: str(path.relative_to(FOLDER)))
def test_no_module_imports_a_trainer(path: Path) -> None:
    assert [name for name in imported_modules(path) if name.startswith("forgather.ml.trainer")] == []
