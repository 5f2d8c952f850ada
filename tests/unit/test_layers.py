"""Layers of the package: an import goes from a layer to the layers below it, and never up."""

import ast
from pathlib import Path

import pytest

import forgather

_PACKAGE = Path(forgather.__file__).parent
PERMITTED = {
    "cli": {"cli", "config", "data", "ml", "tools"},
    "tools": {"tools", "config", "data", "ml"},
    "config": {"config", "data", "ml"},
    "hf": {"hf", "ml"},
    "ml": {"ml"},
    "data": {"data"},
}
"""Folders of `forgather` that each folder may import. Modules with an underscore are open to all."""


def test_every_folder_has_a_layer() -> None:
    folders = {path.parent.name for path in _PACKAGE.glob("*/__init__.py")}
    assert {name for name in folders if not name.startswith("_")} == set(PERMITTED)


@pytest.mark.parametrize("layer", PERMITTED)
def test_layer_imports_only_the_layers_below(layer: str) -> None:
    for path in sorted((_PACKAGE / layer).rglob("*.py")):
        wrong = {name for name in _imported_layers(path) if not name.startswith("_")} - PERMITTED[layer]
        assert not wrong, f"{path.relative_to(_PACKAGE)} imports {sorted(wrong)}"


def _imported_layers(path: Path) -> set[str]:
    """Return the folders of `forgather` that a file imports from, also inside of functions and for types only."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    parts = [name.split(".") for name in names]
    folders = {part[1] for part in parts if part[0] == "forgather" and len(part) > 1}
    return {name for name in folders if (_PACKAGE / name).is_dir()}
