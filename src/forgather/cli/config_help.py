"""The options of `forgather train`, read from the source of the dataclasses: importing one of them would import torch."""

import ast
import importlib.util
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from forgather.cli.configuration import SECTIONS

_USAGE = """\
usage: forgather train [CONFIG] [--trainer KIND] [--KEY VALUE ...] [--print_config] [--debug]

Trains a model as the YAML file CONFIG says; without it, the demo: a small model on the source of Python's standard
library. Running it again goes on from the newest checkpoint in args.output_dir.

  --KEY VALUE     overrides a key of the configuration: --args.max_steps 500, --model.config.hidden_size 256
  --KEY+ VALUE    adds to a list: --callbacks+ '{class_path: TBLogger}'
  --trainer KIND  the same as --trainer.kind KIND; this version has: single
  --print_config  prints the whole configuration as YAML, which can be saved and used as CONFIG, and ends
  --debug         shows Python's traceback of an error
"""
_NAME_WIDTH = 38


@dataclass(frozen=True)
class FieldHelp:
    """A field as its source says it."""

    name: str
    type: str
    default: str
    text: str


def help_text() -> str:
    """The whole help page."""
    classes = _classes_in("forgather.cli.configuration")
    top = {field.name: field for field in _fields(classes["Configuration"])}
    parts = [_USAGE]
    for section, cls in SECTIONS.items():
        about = top[section].text or cls.__doc__ or ""
        parts.append(_section(section, about, _fields(classes[cls.__name__])))
    parts.append(_section("", "Without a section:", [top["optimizer_groups"], top["callbacks"]]))
    parts.append(_section("args", "The training arguments:", _training_arguments()))
    return "\n".join(parts)


def _section(name: str, about: str, fields: list[FieldHelp]) -> str:
    prefix = f"--{name}." if name else "--"
    lines = [f"{name}: {about}" if name else about]
    for field in fields:
        shown = f"  {prefix}{field.name}"
        details = f"({field.type}, {field.default})" if field.default else f"({field.type})"
        lines += _beside(shown, f"{field.text} {details}".strip())
    return "\n".join(lines) + "\n"


def _beside(name: str, text: str) -> list[str]:
    """The text in a column of its own, below the name where that is too long."""
    width = max(min(shutil.get_terminal_size().columns, 120) - _NAME_WIDTH, 30)
    lines = [" " * _NAME_WIDTH + line for line in textwrap.wrap(text, width)]
    if len(name) < _NAME_WIDTH - 1:
        lines[0] = name + lines[0][len(name) :]
        return lines
    return [name, *lines]


def _training_arguments() -> list[FieldHelp]:
    """The fields of `TrainingArguments` and of the classes that it extends, which come first."""
    classes = _classes_in("forgather.ml.trainer.arguments")
    lineage = ["TrainingArguments"]
    while isinstance(base := next(iter(classes[lineage[-1]].bases), None), ast.Name) and base.id in classes:
        lineage.append(base.id)
    return [field for name in reversed(lineage) for field in _fields(classes[name])]


def _classes_in(module: str) -> dict[str, ast.ClassDef]:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _fields(cls: ast.ClassDef) -> list[FieldHelp]:
    return list(_iterate_fields(cls))


def _iterate_fields(cls: ast.ClassDef) -> Iterator[FieldHelp]:
    for node, following in zip(cls.body, [*cls.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield FieldHelp(node.target.id, _type_text(node.annotation), _default_text(node.value), _doc(following))


def _type_text(annotation: ast.expr) -> str:
    text = ast.unparse(annotation)
    return text.replace("dict[str, Any]", "mapping").replace("list[Factory]", "list of {class_path, init_args}")


def _default_text(value: ast.expr | None) -> str:
    if value is None or (isinstance(value, ast.Call) and ast.unparse(value.func) == "field"):
        return ""
    return f"default {ast.unparse(value)}"


def _doc(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split())
    return ""
