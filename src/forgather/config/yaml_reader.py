"""YAML reader with line numbers, floats such as `1e-3`, and errors for repeated keys.

Used by `parser`. Only plain data are constructed (SafeLoader). A text of a kilobyte whose aliases stand for billions of
values is an error, because everything that reads such a configuration would hang.
"""

import re
from collections.abc import Iterator
from typing import Any

import yaml

from forgather.config.errors import UsageError

CONFIG_NAME = "config.yaml"
"""File with the configuration of a run, in its output directory and in each checkpoint."""
# PyYAML's own pattern for floats requires a dot and a sign in the exponent.
_EXPONENT = re.compile(r"[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$")


_MOST_REPEATED = 100_000
"""Values that aliases may add to those that are written."""


_MOST_SHOWN = 100


class _Loader(yaml.SafeLoader):
    """Safe loader that reads 1e-3 as a number: PyYAML follows YAML 1.1, where it is a string."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Construct a value; raise `MarkedYAMLError` for text such as 2020-13-45, which has the form of a date."""
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, int):
                str(value)  # Python limits the digits: a longer number could not be shown in a message.
        except (ValueError, OverflowError, LookupError, AttributeError) as error:
            # PyYAML lets the errors of int, float and date through, with LookupError and AttributeError for explicit tags.
            written = str(node.value)
            shown = repr(written[:_MOST_SHOWN]) + "..." * (len(written) > _MOST_SHOWN)
            reason = f"it cannot be read as {node.tag.rpartition(':')[2]} ({str(error)[:_MOST_SHOWN]})"
            problem = f"{shown} is no value: {reason}. Quote it if it is text"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None
        return value


class _Dumper(yaml.SafeDumper):
    """Safe dumper that quotes strings which `_Loader` would read as numbers."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))


class Entry:
    """Key of a mapping with its value and its line number, counted from 1."""

    def __init__(self, key: str, node: yaml.Node, line: int) -> None:
        self.key = key
        self.line = line
        self._node = node

    @property
    def is_mapping(self) -> bool:
        return isinstance(self._node, yaml.MappingNode)

    @property
    def value(self) -> object:
        return _value_of(self._node)

    @property
    def text(self) -> str:
        """Source text of the value."""
        return str(self._node.value)

    def entries(self, name: str) -> Iterator["Entry"]:
        yield from _entries(self._node, name)


def read_entries(text: str, name: str) -> list[Entry]:
    """Return the top-level entries of a configuration file; an empty file has none."""
    try:
        root = _composed(text)
        entries = [] if root is None else list(_entries(root, name))
        for entry in entries:
            entry.value  # noqa: B018 - values that cannot be made are found here, where their line is known
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}, line {mark.line + 1}" if mark else name
        raise UsageError(f"{where}: invalid YAML: {error.problem or error.context}.") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UsageError(
            f"{name}, line {line}: invalid YAML: the control character #x{error.character:02x} is not permitted."
        ) from None
    return entries


def read_value(text: str, key: str, name: str) -> Entry:
    """Return an entry for a key from a value in YAML."""
    try:
        entry = Entry(key, _composed(text) or yaml.ScalarNode("tag:yaml.org,2002:null", ""), 1)
        entry.value  # noqa: B018 - as above
    except yaml.YAMLError as error:
        raise UsageError(f"{name}: --{key}: invalid YAML: {getattr(error, 'problem', None) or error}.") from None
    return entry


def load_value(text: str) -> object:
    """Parse a value of the command line as YAML; return the text itself if it is not YAML."""
    try:
        root = _composed(text)
        return None if root is None else _value_of(root)
    except yaml.YAMLError:
        return text


def dump(data: object) -> str:
    """Return the data as YAML that `read_entries` reads back to the same values."""
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100))


def _composed(text: str) -> yaml.Node | None:
    """Return the nodes of a text; raise `MarkedYAMLError` for a text that is too deep, or that aliases multiply."""
    try:
        root = yaml.compose(text, Loader=_Loader)
        if root is not None:
            sizes: dict[int, int] = {}
            if _size(root, sizes) > len(sizes) + _MOST_REPEATED:
                raise yaml.MarkedYAMLError(
                    problem=f"its aliases repeat more than {_MOST_REPEATED:,} values", problem_mark=root.start_mark
                )
    except RecursionError:
        raise yaml.MarkedYAMLError(problem="its values are nested too deeply") from None
    return root


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """Return how many values a node stands for, with those that its aliases repeat."""
    if id(node) not in known:
        # An anchor inside its own value.
        known[id(node)] = _MOST_REPEATED + 1
        inner = [one for pair in node.value for one in pair] if isinstance(node, yaml.MappingNode) else node.value
        known[id(node)] = 1 + (0 if isinstance(node, yaml.ScalarNode) else sum(_size(one, known) for one in inner))
    return known[id(node)]


def _value_of(node: yaml.Node) -> object:
    loader = _Loader("")
    try:
        return loader.construct_document(node)
    except RecursionError:
        raise yaml.MarkedYAMLError(problem="its values are nested too deeply") from None
    finally:
        loader.dispose()


def _entries(node: yaml.Node, name: str) -> Iterator[Entry]:
    if not isinstance(node, yaml.MappingNode):
        raise UsageError(f"{name}, line {node.start_mark.line + 1}: expected keys and values, not {node.value!r}.")
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        key, line = str(key_node.value), key_node.start_mark.line + 1
        # PyYAML would silently keep the last value.
        if key in seen:
            raise UsageError(f"{name}, line {line}: {key!r} is already set in line {seen[key]}; remove one of the two.")
        seen[key] = line
        yield Entry(key, value_node, line)
