"""Parsing of configurations: YAML file and command-line options become a typed `Configuration`.

Unknown keys and wrong types raise `UsageError` with their file and line. Later settings override earlier ones. Called
by `commands/train.py` and `work/finalize.py`.
"""

import dataclasses
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forgather._suggestions import nearest_name, suggest
from forgather.config import yaml_reader
from forgather.config.errors import UsageError
from forgather.config.field_types import fitting, is_list, is_mapping, name_of, options_of
from forgather.config.help import kinds_with_argument
from forgather.config.other_names import other_name_hint
from forgather.config.schema import PLAIN_KEYS, SECTIONS, Configuration
from forgather.config.trainer_kinds import DEFAULT_KIND, load_arguments
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments

_ON_COMMAND_LINE = "on the command line"
_LISTS_OF_SETTINGS = ("args", "trainer")
"""Sections that keep their other keys when an option sets some of them."""


@dataclass(frozen=True)
class Setting:
    """Value of a key such as "args.max_steps", and where it was set."""

    key: str
    value: object
    origin: str


@dataclass(frozen=True)
class Option:
    """Option of the command line: --key value; `text` is None if no value followed."""

    key: str
    text: str | None


class ConfigurationParser:
    """Parser that collects settings, later ones overriding earlier ones, and builds the configuration.

    `option_names` are other options of the command: messages about an unknown option may suggest them.
    """

    def __init__(self, trainer_kind: str = DEFAULT_KIND, option_names: Sequence[str] = ()) -> None:
        self._trainer_kind = trainer_kind
        self._option_names = option_names
        self._sections = _with_inner_sections({**SECTIONS, "args": load_arguments(trainer_kind)})
        self._hints = _hints_of(self._sections)
        self._settings: dict[str, Setting] = {}

    def read_file(self, path: str, name: str | None = None) -> None:
        """Read the settings of a YAML file; `name` is its name in messages."""
        name = name or path
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise UsageError(f"The configuration {path!r} cannot be read: {error.strerror or error}.") from None
        except UnicodeDecodeError as error:
            raise UsageError(
                f"The configuration {path!r} cannot be read: it is no text in UTF-8, because of byte {error.start}."
            ) from None
        for entry in yaml_reader.read_entries(text, name):
            self._take(entry, entry.key, name)

    def _take(self, entry: yaml_reader.Entry, key: str, name: str) -> None:
        """Set the value of an entry; for a section, set its entries one by one."""
        origin = name if name == _ON_COMMAND_LINE else f"{name}, line {entry.line}"
        if key not in self._sections:
            self._set(Setting(key, self._value_in_file(entry, key), origin))
        elif entry.is_mapping:
            for inner in entry.entries(name):
                self._take(inner, f"{key}.{inner.key}", name)
        elif entry.value is not None:
            self._refuse(Setting(key, entry.value, origin), "a mapping of its keys")

    def _value_in_file(self, entry: yaml_reader.Entry, key: str) -> object:
        """Return the value of an entry, or its source text if the field is a string and the value is a boolean."""
        value = entry.value
        hint = self._hints.get(key)
        # YAML 1.1 reads a plain `no` or `on` as a boolean, but `eval_strategy: no` means the string.
        is_text = isinstance(value, bool) and hint is not None and not _fits(hint, value) and _fits(hint, entry.text)
        return entry.text if is_text else value

    def override(self, option: Option) -> None:
        """Apply an option of the command line: a key, a key inside a mapping, or one more list element (+)."""
        if option.key.endswith("+"):
            return self._append(option)
        if option.key in self._sections:
            return self._override_section(option)
        field = self._field_of(option.key)
        if field is None:
            raise self._unknown_key(option.key, _ON_COMMAND_LINE, prefix="--")
        if field == option.key:
            return self._set(Setting(field, self._value_of(option), _ON_COMMAND_LINE))
        present = self._present(field)
        value = dict(present) if isinstance(present, Mapping) else {}
        _put(value, option.key[len(field) + 1 :].split("."), yaml_reader.load_value(self._text_of(option)))
        return self._set(Setting(field, value, _ON_COMMAND_LINE))

    def _override_section(self, option: Option) -> None:
        """Apply a mapping for a full section: `--model '{pretrained: DIR}'`.

        It replaces sections that describe one object, such as the model. In `args` and `trainer` it sets only the given
        keys.
        """
        entry = yaml_reader.read_value(self._text_of(option), option.key, _ON_COMMAND_LINE)
        if not entry.is_mapping:
            self._refuse(
                Setting(option.key, entry.value, _ON_COMMAND_LINE), f"a mapping of its keys, {_example(option)}"
            )
        # A new model or dataset must not inherit keys of the section that it replaces.
        if option.key.partition(".")[0] not in _LISTS_OF_SETTINGS:
            self._settings = {key: one for key, one in self._settings.items() if not key.startswith(f"{option.key}.")}
        self._take(entry, option.key, _ON_COMMAND_LINE)

    def configuration(self) -> Configuration:
        """Return the configuration from all settings and defaults."""
        sections = {name: self._section(name) for name in self._sections if "." not in name}
        plain: dict[str, Any] = {key: setting.value for key, setting in self._settings.items() if key in PLAIN_KEYS}
        return Configuration(**sections, **plain)

    def _section(self, name: str) -> Any:
        """Build a section from its settings; nested sections without settings keep their defaults."""
        inside = f"{name}."
        values = {_last(key): one.value for key, one in self._settings.items() if key.rpartition(".")[0] == name}
        for inner in self._sections:
            if inner.rpartition(".")[0] == name and any(key.startswith(f"{inner}.") for key in self._settings):
                values[inner.removeprefix(inside)] = self._section(inner)
        try:
            return self._sections[name](**values)
        except ValueError as error:
            # Messages of section checks begin with the field name. Messages of a nested section may have the section
            # name before it.
            message = str(error).removeprefix(f"{_last(name)}.")
            setting = self._settings.get(f"{name}.{message.partition('=')[0]}")
            raise UsageError(f"{f'{setting.origin}: ' if setting else ''}{name}.{message}") from None

    def _set(self, setting: Setting) -> None:
        if setting.key not in self._hints:
            raise self._unknown_key(setting.key, setting.origin)
        hint = self._hints[setting.key]
        try:
            value = fitting(hint, setting.value)
        except ValueError:
            self._refuse(setting, name_of(hint))
        else:
            self._settings[setting.key] = dataclasses.replace(setting, value=value)

    def _append(self, option: Option) -> None:
        key = option.key.removesuffix("+")
        if key not in self._hints or not is_list(self._hints[key]):
            lists = [f"--{known}+" for known, hint in self._hints.items() if is_list(hint)]
            raise UsageError(f"--{option.key}: + appends to lists only: {', '.join(lists)}.")
        value = yaml_reader.load_value(self._text_of(option))
        present = self._present(key)
        values = [*present, value] if isinstance(present, (list, tuple)) else [value]
        self._set(Setting(key, values, _ON_COMMAND_LINE))

    def _value_of(self, option: Option) -> object:
        """Return the text parsed as YAML if that fits the field, else the text: `--args.output_dir 2024` is a string."""
        hint = self._hints[option.key]
        # A flag without a value: `--args.use_cpu`.
        if option.text is None and bool in options_of(hint):
            return True
        text = self._text_of(option)
        value = yaml_reader.load_value(text)
        # A single value for a list field is a list with one element: `--data.files notes.txt`.
        candidates = [value, text, [value], [text]] if is_list(hint) else [value, text]
        return next((one for one in candidates if _fits(hint, one)), value)

    def _text_of(self, option: Option) -> str:
        if option.text is None:
            raise UsageError(f"--{option.key} needs a value.")
        return option.text

    def _present(self, key: str) -> object:
        setting = self._settings.get(key)
        return None if setting is None else setting.value

    def _field_of(self, key: str) -> str | None:
        """Return the field that a key names, or the mapping field that contains it."""
        inside = [name for name, hint in self._hints.items() if key.startswith(f"{name}.") and is_mapping(hint)]
        return key if key in self._hints else next(iter(inside), None)

    def _unknown_key(self, key: str, origin: str, prefix: str = "") -> UsageError:
        section, _, name = key.partition(".")
        known = [*self._hints, *self._sections, *(self._option_names if prefix else ())]
        nearest = _nearest_key(prefix + key, [prefix + one for one in known])
        if section in self._sections and name:
            own = [one for one in self._hints if one.startswith(f"{section}.")]
            nearest = _nearest_key(prefix + key, [prefix + one for one in own]) or nearest
        # The most specific hint wins: argument of another trainer, name from another program, similar spelling.
        hint = self._trainer_hint(key) or other_name_hint(key, prefix) or suggest(nearest)
        return UsageError(f"{origin}: there is no key {prefix + key!r}.{hint} forgather train --help lists all keys.")

    def _trainer_hint(self, key: str) -> str:
        """Return a sentence that names the trainers with this argument, if the chosen trainer does not have it."""
        section, _, name = key.partition(".")
        kinds = kinds_with_argument(name) if section == "args" else []
        if not kinds or self._trainer_kind in kinds:
            return ""
        return f" It belongs to --trainer {' or '.join(kinds)}, but trainer.kind is {self._trainer_kind!r}."

    def _refuse(self, setting: Setting, expected: str) -> None:
        value = setting.value
        raise UsageError(
            f"{setting.origin}: {setting.key}={value!r} has type {type(value).__name__}, expected {expected}."
        )


def _nearest_key(key: str, known: Sequence[str]) -> str | None:
    """Return the key that was probably meant: a key with the same last part, else a key with a similar spelling.

    A key in the wrong section, or without a section, has the right last part.
    """
    name = key.lstrip("-").replace("-", "_").rpartition(".")[2]
    same_names = [one for one in known if one.endswith(f".{name}")]
    nearest = nearest_name(key, known)
    return same_names[0] if same_names and nearest not in same_names else nearest


def to_dict(configuration: Configuration) -> dict[str, Any]:
    """Return the configuration as plain data, in the order of its sections."""
    return {name: _plain(value) for name, value in dataclasses.asdict(configuration).items()}


def trainer_kind(path: str, options: Sequence[Option]) -> str:
    """Return the trainer kind that file and options choose, before the full parse: the keys of `args` depend on it.

    An unusable file is ignored here; the parser reports it later.
    """
    kinds: list[object] = [option.text for option in options if option.key == "trainer.kind"]
    kinds += [_kind_in(yaml_reader.load_value(option.text or "")) for option in options if option.key == "trainer"]
    chosen = [kind for kind in kinds if isinstance(kind, str)]
    if chosen:
        return chosen[-1]
    try:
        content = yaml_reader.load_value(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return DEFAULT_KIND
    kind = _kind_in(content.get("trainer")) if isinstance(content, Mapping) else None
    return kind if isinstance(kind, str) else DEFAULT_KIND


def _kind_in(section: object) -> object:
    return section.get("kind") if isinstance(section, Mapping) else None


def split_options(words: Sequence[str]) -> tuple[list[str], list[Option]]:
    """Split the command line into positional words and `--key value` or `--key=value` options."""
    alone: list[str] = []
    options: list[Option] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            alone.append(word)
            continue
        key, equals, text = word[2:].partition("=")
        if equals:
            options.append(Option(key, text))
        # A single dash may begin a value, such as a negative number.
        elif rest and not rest[0].startswith("--"):
            options.append(Option(key, rest.pop(0)))
        else:
            options.append(Option(key, None))
    return alone, options


def _with_inner_sections(sections: Mapping[str, type]) -> dict[str, type]:
    """Return the sections and their nested dataclass fields, such as "args.ddp"."""
    found: dict[str, type] = {}
    for name, cls in sections.items():
        found[name] = cls
        for field, hint in typing.get_type_hints(cls).items():
            inner = next(
                (one for one in options_of(hint) if isinstance(one, type) and dataclasses.is_dataclass(one)), None
            )
            if inner is not None:
                found |= _with_inner_sections({f"{name}.{field}": inner})
    return found


def _hints_of(sections: Mapping[str, type]) -> dict[str, object]:
    """Return the types of all fields that are not sections."""
    hints: dict[str, object] = {}
    for section, cls in sections.items():
        types_of_fields = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if f"{section}.{field.name}" not in sections:
                hints[f"{section}.{field.name}"] = types_of_fields[field.name]
    # The schema imports TrainingArguments for type checkers only, so the name must be supplied here.
    types_of_top = typing.get_type_hints(Configuration, localns={"TrainingArguments": TrainingArguments})
    return hints | {key: types_of_top[key] for key in PLAIN_KEYS}


def _example(option: Option) -> str:
    examples = {
        "model": "pretrained: DIR",
        "data": "files: [notes.txt]",
        "tokenizer": "path: DIR",
        "args": "max_steps: 100",
    }
    return f"such as --{option.key} '{{{examples.get(option.key, 'class_path: PATH')}}}'"


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _fits(hint: object, value: object) -> bool:
    try:
        fitting(hint, value)
    except ValueError:
        return False
    return True


def _put(target: dict[str, Any], path: Iterable[str], value: object) -> None:
    """Set a value inside nested mappings, copying the mappings on the way."""
    first, *rest = path
    if rest:
        inner = target.get(first)
        target[first] = dict(inner) if isinstance(inner, Mapping) else {}
        _put(target[first], rest, value)
    else:
        target[first] = value


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value
