"""API pages: one page per public module, with signatures and docstrings, read with `ast`."""

import ast
import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from docsite import source_code
from docsite.source_code import Found, documentation

# Order decides where a name is documented: at the first module that has it. Later modules link to it.
MODULES = (
    "forgather.ml.trainer",
    "forgather.ml.trainer.trainer_types",
    "forgather.ml.trainer.arguments",
    "forgather.ml.trainer.callbacks",
    "forgather.ml.trainer.ddp",
    "forgather.ml.trainer.fsdp2",
    "forgather.ml.trainer.accelerate",
    "forgather.ml.trainer.pipeline",
    "forgather.ml.trainer.hybrid",
    "forgather.ml.checkpoint",
    "forgather.ml.checkpoint.foreign",
    "forgather.ml.sharded_checkpoint",
    "forgather.ml.distributed",
    "forgather.ml.distributed.watch",
    "forgather.ml.loss",
    "forgather.ml.optim",
    "forgather.ml.finalize",
    "forgather.ml.construct",
    "forgather.ml.datasets",
    "forgather.data",
    "forgather.hf",
    "forgather.tools",
    "forgather",
)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_INTRODUCTION = """\
# API

Generated from the docstrings. A name is described in one place; other modules that export it link there. Names with a
leading underscore are internal, except for the hooks in [custom trainers](../../custom-trainers.md).

"""


@dataclass(frozen=True)
class Index:
    """Public names: where each definition is described, by its home and by its short name."""

    homes: dict[str, str]
    short: dict[str, str]

    def home(self, found: Found) -> str | None:
        return self.homes.get(_key(found))

    def linked(self, name: str) -> str:
        """Return a link to a public name, or the name as code."""
        return f"{{py:obj}}`{name} <{self.short[name]}>`" if name in self.short else f"`{name}`"

    def annotation(self, node: ast.AST, module: str) -> str:
        """Return the source of an annotation or signature, in which public classes have their full names."""
        return ast.unparse(_FullNames(self, module).visit(copy.deepcopy(node)))


class _FullNames(ast.NodeTransformer):
    """Replaces the names of public classes by full names, because Sphinx cannot link a name that two modules have."""

    def __init__(self, index: Index, module: str) -> None:
        self._index, self._module = index, module

    def visit_Name(self, node: ast.Name) -> ast.Name:
        found = source_code.find(self._module, node.id)
        home = None if found is None or not isinstance(found.node, ast.ClassDef) else self._index.home(found)
        return ast.Name(home or node.id)


def write_pages(folder: Path) -> None:
    """Write the pages of all modules and their index."""
    modules = [module for listed in MODULES for module in _with_submodules(listed)]
    names = {module: source_code.public_names(module) for module in modules}
    index = _index_of(names)
    folder.mkdir(parents=True, exist_ok=True)
    for module in modules:
        (folder / f"{module}.md").write_text(_module_page(module, names[module], index), encoding="utf-8")
    ordered = sorted(modules)
    rows = "".join(f"| [`{module}`]({module}.md) | {_first_sentence(module)} |\n" for module in ordered)
    # Short titles, since the sidebar is narrow.
    toctree = "\n".join(f"{module.removeprefix('forgather.')} <{module}>" for module in ordered)
    (folder / "index.md").write_text(
        f"{_INTRODUCTION}| module | contents |\n|---|---|\n{rows}\n```{{toctree}}\n:hidden:\n\n{toctree}\n```\n",
        encoding="utf-8",
    )


def _index_of(names: dict[str, list[str]]) -> Index:
    homes: dict[str, str] = {}
    for module, listed in names.items():
        for name in listed:
            found = source_code.find(module, name)
            if found is not None:
                homes.setdefault(_key(found), f"{module}.{name}")
    return Index(homes, {full.rpartition(".")[2]: full for full in reversed(homes.values())})


def _with_submodules(module: str) -> Iterator[str]:
    """Yield the module; for a package without public names of its own, its public modules too."""
    yield module
    if source_code.path_of(module).name == "__init__.py" and not source_code.public_names(module):
        for inner in source_code.modules_below(module):
            yield from _with_submodules(inner)


def _key(found: Found) -> str:
    return f"{found.module}:{found.name}"


def _first_sentence(module: str) -> str:
    text = " ".join((ast.get_docstring(source_code.tree_of(module)) or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", text)[0].replace("|", "\\|")


def _module_page(module: str, names: list[str], index: Index) -> str:
    about = _markdown(ast.get_docstring(source_code.tree_of(module)) or "", index)
    lines = [f"# `{module}`\n", about, f"```{{py:module}} {module}\n```\n"]
    elsewhere = []
    for name in names:
        found = source_code.find(module, name)
        home = None if found is None else index.home(found)
        if found is not None and home == f"{module}.{name}":
            lines.append(_entry(found, name, index))
        elif home is not None:
            elsewhere.append(f"- {{py:obj}}`{name} <{home}>`")
    if elsewhere:
        lines += ["\n## Exported from other modules\n", *elsewhere]
    return "\n".join(lines) + "\n"


def _entry(found: Found, name: str, index: Index) -> str:
    node = found.node
    if isinstance(node, ast.ClassDef):
        return _class_entry(found, node, name, index)
    text = _markdown(found.docstring, index)
    if isinstance(node, _FUNCTIONS):
        return _directive("function", f"{name}{_signature(node, found.module, index)}", text, 3)
    return _directive("data", name, text, 3)


def _class_entry(found: Found, node: ast.ClassDef, name: str, index: Index) -> str:
    parts = [_markdown(found.docstring, index)]
    bases = [ast.unparse(base).partition("[")[0] for base in node.bases]
    bases = [base for base in bases if not base.startswith("_")]
    if bases:
        parts.append(
            "Bases: " + ", ".join(index.linked(base) if base != name else f"`{base}`" for base in bases) + "\n"
        )
    if name.endswith("Arguments"):
        parts.append("Its fields are listed in [training arguments](../arguments.md).\n")
    else:
        parts += _attributes(node, found.module, index)
    for method in node.body:
        if isinstance(method, _FUNCTIONS) and not method.name.startswith("_") and not _is_setter(method):
            parts.append(_method(method, found.module, index))
    return _directive("class", f"{name}{_class_signature(node, found.module, index)}", "\n".join(parts), 4)


def _is_setter(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(one).endswith((".setter", ".deleter")) for one in method.decorator_list)


def _method(method: ast.FunctionDef | ast.AsyncFunctionDef, module: str, index: Index) -> str:
    decorators = {ast.unparse(one) for one in method.decorator_list}
    text = _markdown(ast.get_docstring(method) or "", index)
    if decorators & {"property", "functools.cached_property", "cached_property"}:
        kind = f":type: {index.annotation(method.returns, module)}\n\n" if method.returns is not None else ""
        return _directive("property", method.name, kind + text, 3)
    flags = "".join(f":{one}:\n" for one in ("classmethod", "staticmethod", "abstractmethod") if one in decorators)
    signature = _signature(method, module, index, is_method="staticmethod" not in decorators)
    return _directive("method", f"{method.name}{signature}", f"{flags}\n{text}", 3)


def _attributes(node: ast.ClassDef, module: str, index: Index) -> Iterator[str]:
    """Yield public fields of a dataclass or enum, and documented attributes of other classes."""
    plain = any("dataclass" in ast.unparse(one) for one in node.decorator_list)
    plain = plain or any(word in ast.unparse(base) for base in node.bases for word in ("Enum", "NamedTuple"))
    for item, following in zip(node.body, [*node.body[1:], None], strict=True):
        text = documentation(following)
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            name, options = item.target.id, f":type: {index.annotation(item.annotation, module)}\n"
        elif isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
            name, options = item.targets[0].id, ""
        else:
            continue
        if item.value is not None and len(ast.unparse(item.value)) < 60:
            options += f":value: {ast.unparse(item.value)}\n"
        if not name.startswith("_") and (plain or text):
            yield _directive("attribute", name, f"{options}\n{_markdown(text, index)}", 3)


def _class_signature(node: ast.ClassDef, module: str, index: Index) -> str:
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            return _signature(method, module, index, is_method=True).partition(" -> ")[0]
    return ""


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef, module: str, index: Index, is_method: bool = False) -> str:
    arguments = index.annotation(node.args, module)
    if is_method:
        arguments = re.sub(r"^(self|cls)(, )?(/, )?", "", arguments)
    returns = "" if node.returns is None else f" -> {index.annotation(node.returns, module)}"
    return f"({arguments}){returns}"


def _directive(kind: str, signature: str, text: str, num_backticks: int) -> str:
    fence = "`" * num_backticks
    return f"{fence}{{py:{kind}}} {signature}\n{text.strip(chr(10))}\n{fence}\n"


def _markdown(docstring: str, index: Index) -> str:
    """Return a docstring as Markdown: `Args:` becomes a field list, and names of public objects become links."""
    head, _, arguments = docstring.partition("Args:\n")
    # Text such as <output_dir> outside of code would be read as HTML.
    parts = re.split(r"(`[^`]*`)", head)
    head = "".join(part if part.startswith("`") else part.replace("<", "&lt;") for part in parts)
    text = re.sub(r"(?<![`\w}])`([A-Za-z_]\w*)`(?!`)", lambda found: index.linked(found[1]), head)
    fields = re.sub(r"^    (\*{0,2}\w+): ", r":param \1: ", arguments, flags=re.MULTILINE)
    return f"{text}\n{fields.replace(':param *', ':param ' + chr(92) + '*')}\n" if arguments else f"{text}\n"
