"""Access to definitions in the source of Forgather with `ast`: modules, public names, and the home of a name."""

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCE = REPOSITORY / "src"

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Found:
    """Definition of a name, the module that contains it, and the docstring below it (for assignments)."""

    module: str
    name: str
    node: Definition
    text: str = ""

    @property
    def docstring(self) -> str:
        if isinstance(self.node, _DEFINITIONS):
            return ast.get_docstring(self.node) or ""
        return self.text


def path_of(module: str) -> Path:
    """Return the source file of a module."""
    path = SOURCE.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(path_of(module).read_text(encoding="utf-8"))


def modules_below(package: str) -> list[str]:
    """Return the public modules and packages directly inside a package."""
    names = [path.stem for path in path_of(package).parent.iterdir() if path.suffix == ".py" or path.is_dir()]
    return [f"{package}.{name}" for name in sorted(names) if not name.startswith("_")]


def public_names(module: str) -> list[str]:
    """Return `__all__`, or else the public classes and functions that the module defines."""
    tree = tree_of(module)
    listed = _assigned(tree, "__all__")
    if listed is not None:
        return sorted(_strings(listed, tree))
    return [node.name for node in tree.body if isinstance(node, _DEFINITIONS) and not node.name.startswith("_")]


def find(module: str, name: str) -> Found | None:
    """Return the definition of a name, following imports inside Forgather; None if it is not an own definition."""
    statements = list(_top_level(tree_of(module)))
    for node, following in zip(statements, [*statements[1:], None], strict=True):
        if isinstance(node, _DEFINITIONS) and node.name == name:
            return _stub_or_module(module, name, node)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and name in _targets(node):
            return Found(module, name, node, documentation(following))
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return find(str(node.module), alias.name) if str(node.module).startswith("forgather") else None
    return None


def documentation(node: ast.stmt | None) -> str:
    """Return the text of a docstring below a field or constant."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split())
    return ""


def _stub_or_module(module: str, name: str, node: Definition) -> Found:
    """Return the definition, or for a stub the function of the same name in the submodule that it stands for."""
    inner = path_of(module).parent / f"{name}.py"
    is_stub = path_of(module).name == "__init__.py" and inner.exists()
    return (find(f"{module}.{name}", name) if is_stub else None) or Found(module, name, node)


def _top_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the statements of a module, and those below `if`, such as imports for type checkers."""
    for node in tree.body:
        yield from node.body if isinstance(node, ast.If) else [node]


def _targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _assigned(tree: ast.Module, name: str) -> ast.expr | None:
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and name in _targets(node):
            return node.value
    return None


def _strings(node: ast.expr | None, tree: ast.Module) -> list[str]:
    """Return the strings of a list, tuple, or dict (its keys), including starred names of such a value."""
    if isinstance(node, ast.Name):
        return _strings(_assigned(tree, node.id), tree)
    parts = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
    found: list[str] = []
    for part in parts:
        if isinstance(part, ast.Starred):
            found += _strings(part.value, tree)
        elif isinstance(part, ast.Constant):
            found.append(str(part.value))
    return found
