"""Help page of `forgather train`, read from the source of the argument dataclasses with `ast`.

Importing the dataclasses would import torch, which takes seconds. Field docstrings are the help texts, and calls of
`self._choose(name, values)` the allowed values.
"""

import ast
import functools
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import forgather
from forgather.config.schema import PLAIN_KEYS, SECTIONS
from forgather.config.trainer_kinds import DEFAULT_KIND, TRAINERS

_USAGE = """\
usage: forgather train [CONFIG] [--trainer KIND] [--nproc N] [--KEY VALUE ...] [--print_config] [--debug]

Train a model from the YAML file CONFIG. Without CONFIG, train the demo: a small model on the source of Python's
standard library. Running the command again resumes from the newest checkpoint in args.output_dir.

  --KEY VALUE     override a key of the configuration: --args.max_steps 500, --model.config.hidden_size 256
  --SECTION '{{KEY: VALUE, ...}}'
                  replace a section, --model '{{pretrained: DIR}}'; for args and trainer, set only the given keys
  --KEY+ VALUE    append to a list: --callbacks+ '{{class_path: TBLogger}}'
  --trainer KIND  same as --trainer.kind KIND; available: {trainers}
  --print_config  print the full configuration as YAML, which can be saved and used as CONFIG, and exit
  --debug         show the traceback of an error

Multiple processes (--trainer {several}); omit these options under torchrun:

  --nproc N       processes on this node
  -d 0,1          one process on each of these devices
  --nnodes M --node-rank R --rdzv-endpoint HOST:PORT
                  M nodes: run the same command on each, with its own R from 0, and an address of node 0
  --nnodes MIN:MAX --rdzv-endpoint HOST:PORT [--node-wait S] [--node-timeout T]
                  elastic job: restarts on the nodes that are left when one is lost, and grows when one joins; waits S
                  seconds (15) for more nodes once MIN have joined, and T seconds (900) while fewer are left
  --max-restarts K
                  restart all processes up to K times after a failure; they resume from the newest checkpoint
"""
_NAME_WIDTH = 38
_STRATEGIES = ("no", "steps", "epoch")


@dataclass(frozen=True)
class FieldHelp:
    """Help of a field as written in the source."""

    name: str
    type: str
    default: str
    text: str
    choices: str = ""


def help_text() -> str:
    """Return the full help page."""
    classes = _classes_in("forgather.config.schema")
    top = {field.name: field for field in _fields(classes["Configuration"])}
    several = " or ".join(kind for kind, found in TRAINERS.items() if found.uses_processes)
    parts = [_USAGE.format(trainers=", ".join(TRAINERS), several=several)]
    for section, cls in SECTIONS.items():
        about = top[section].text or cls.__doc__ or ""
        fields = _fields(classes[cls.__name__])
        if section == "trainer":
            fields = [replace(one, choices=_listed(tuple(TRAINERS))) if one.name == "kind" else one for one in fields]
        parts.append(_section(section, about, fields))
    parts.append(_section("", "Keys without a section:", [top["optimizer_groups"], top["callbacks"]]))
    common = arguments_of(DEFAULT_KIND)
    parts.append(_section("args", "Training arguments:", common))
    for kind in TRAINERS:
        # Fields compare with their defaults, so an argument with another default is listed again.
        own = [field for field in arguments_of(kind) if field not in common]
        if own:
            parts.append(_section("args", f"Additional arguments of --trainer {kind}:", own))
    return "\n".join(parts)


def kinds_with_argument(name: str) -> list[str]:
    """Return the trainers that have an argument of this name, such as "ddp.bucket_cap_mb"."""
    return [kind for kind in TRAINERS if any(field.name == name for field in arguments_of(kind))]


@dataclass(frozen=True)
class ConfigurationKey:
    """Key of the configuration, such as "args.max_steps", with its allowed values if they are few."""

    name: str
    text: str
    choices: tuple[str, ...] = ()


def configuration_keys() -> list[ConfigurationKey]:
    """Return all keys of a configuration, with the arguments of every trainer."""
    classes = _classes_in("forgather.config.schema")
    keys: dict[str, ConfigurationKey] = {}
    for section, cls in SECTIONS.items():
        for field in _fields(classes[cls.__name__]):
            choices: tuple[object, ...] = tuple(TRAINERS) if (section, field.name) == ("trainer", "kind") else ()
            keys[f"{section}.{field.name}"] = _key(f"{section}.{field.name}", field, choices)
    for field in _fields(classes["Configuration"]):
        if field.name in PLAIN_KEYS:
            keys[field.name] = _key(field.name, field, ())
    for found in TRAINERS.values():
        allowed = choices_of(found.arguments_module, found.arguments_name)
        for field in _all_fields(found.arguments_module, found.arguments_name):
            name = f"args.{field.name}"
            keys.setdefault(name, _key(name, field, allowed.get(field.name, ())))
    return list(keys.values())


def _key(name: str, field: FieldHelp, choices: Sequence[object]) -> ConfigurationKey:
    names = tuple(str(choice) for choice in choices if choice is not None)
    return ConfigurationKey(name, field.text, names or (("true", "false") if field.type == "bool" else ()))


def _section(name: str, about: str, fields: list[FieldHelp]) -> str:
    prefix = f"--{name}." if name else "--"
    lines = [f"{name}: {about}" if name else about]
    for field in fields:
        shown = f"  {prefix}{field.name}"
        details = ", ".join(part for part in (field.type, field.default) if part)
        choices = f"{field.choices}; " if field.choices else ""
        lines += _beside(shown, f"{field.text} ({choices}{details})".strip())
    return "\n".join(lines) + "\n"


def _beside(name: str, text: str) -> list[str]:
    """Return the text in a column beside the name, or below the name if it is too long."""
    width = max(min(shutil.get_terminal_size().columns, 120) - _NAME_WIDTH, 30)
    lines = [" " * _NAME_WIDTH + line for line in textwrap.wrap(text, width)]
    if len(name) < _NAME_WIDTH - 1:
        lines[0] = name + lines[0][len(name) :]
        return lines
    return [name, *lines]


def arguments_of(kind: str) -> list[FieldHelp]:
    """Return the fields of a trainer's arguments, base classes first."""
    found = TRAINERS[kind]
    choices = choices_of(found.arguments_module, found.arguments_name)
    fields = _all_fields(found.arguments_module, found.arguments_name)
    return [replace(field, choices=_listed(choices.get(field.name, ()))) for field in fields]


def _all_fields(module: str, class_name: str) -> Iterator[FieldHelp]:
    """Yield the fields of a class and of its bases; fields of nested dataclasses get dotted names."""
    place = _find_class(module, class_name)
    if place is None:
        return
    home, cls = place
    for base in cls.bases:
        if isinstance(base, ast.Name):
            yield from _all_fields(home, base.id)
    for field in _iterate_fields(cls):
        inner = list(_all_fields(home, field.type)) if field.type.isidentifier() else []
        yield from (replace(one, name=f"{field.name}.{one.name}") for one in inner)
        if not inner:
            yield field


def choices_of(module: str, class_name: str) -> dict[str, tuple[object, ...]]:
    """Return the allowed values of fields, from the checks of a class (`self._choose(name, values)`)."""
    place = _find_class(module, class_name)
    if place is None:
        return {}
    home, cls = place
    choices: dict[str, tuple[object, ...]] = {}
    for base in cls.bases:
        if isinstance(base, ast.Name):
            choices |= choices_of(home, base.id)
    for node in ast.walk(cls):
        # The strategies are checked in a loop over field names: `for name in (...): self._check_strategy(name)`.
        if isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple) and _calls(node.body[0], "_check_strategy"):
            choices |= {str(name): _STRATEGIES for name in ast.literal_eval(node.iter)}
        elif isinstance(node, ast.Call) and _calls(node, "_choose") and isinstance(node.args[0], ast.Constant):
            choices[str(node.args[0].value)] = _values(node.args[1], home)
    return choices


def _calls(node: ast.AST, method: str) -> bool:
    call = node.value if isinstance(node, ast.Expr) else node
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == method


def _values(node: ast.expr, module: str) -> tuple[object, ...]:
    """Return the constants of a list in the source, including lists that the module names or imports."""
    if isinstance(node, ast.Name):
        return _values_of_name(node.id, module)
    if not isinstance(node, (ast.List, ast.Tuple)):
        return ()
    values: list[object] = []
    for one in node.elts:
        if isinstance(one, ast.Starred):
            values += _values(one.value, module)
        elif isinstance(one, ast.Constant):
            values.append(one.value)
    return tuple(values)


def _values_of_name(name: str, module: str) -> tuple[object, ...]:
    for node in _tree_of(module).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(one, ast.Name) and one.id == name for one in targets):
                return _values(node.value, module)
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            return _values_of_name(name, str(node.module)) if str(node.module).startswith("forgather.") else ()
    return ()


def _listed(values: Sequence[object]) -> str:
    """Return values in words: a, b or c; None is omitted, since the type shows it."""
    names = [str(value) for value in values if value is not None]
    return f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else "".join(names)


def _find_class(module: str, name: str) -> tuple[str, ast.ClassDef] | None:
    """Return a Forgather class and the module that defines it, following the imports of `module`."""
    tree = _tree_of(module)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            is_ours = node.module is not None and node.module.startswith("forgather.")
            return _find_class(str(node.module), name) if is_ours else None
    return None


def _classes_in(module: str) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in _tree_of(module).body if isinstance(node, ast.ClassDef)}


# Several trainers share most of their argument classes.
@functools.cache
def _tree_of(module: str) -> ast.Module:
    return ast.parse(_source_path(module).read_text(encoding="utf-8"))


def _source_path(module: str) -> Path:
    """Return the source file of a Forgather module."""
    # `importlib.util.find_spec` would import the parent packages, and torch with them.
    _, *names = module.split(".")
    path = Path(forgather.__file__).parent.joinpath(*names)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


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
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
        value = next((keyword.value for keyword in value.keywords if keyword.arg == "default"), None)
    return "" if value is None else f"default {ast.unparse(value)}"


def _doc(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split())
    return ""
