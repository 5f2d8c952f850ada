"""Specification of commands for completion: their options, values and sub-commands, read from argparse parsers."""

import argparse
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

# Metavars of paths, such as OUTPUT_DIR, RUN_A or A, but not TIMEOUT.
_NAMES_OF_PATHS = re.compile(r"(^|_)(PATH|FILE|DIR|CONFIG|CHECKPOINT|OUT|OUTPUT|RUN)S?(_|$)|^[AB]$")
_LONGEST_HELP = 60


@dataclass(frozen=True)
class OptionSpec:
    """Option, or a positional argument, for which `names` is empty."""

    names: tuple[str, ...]
    text: str
    takes_value: bool = True
    choices: tuple[str, ...] = ()
    is_path: bool = False


@dataclass(frozen=True)
class CommandSpec:
    """Command, or sub-command, for which `path` has two names."""

    path: tuple[str, ...]
    text: str
    options: tuple[OptionSpec, ...] = ()
    positionals: tuple[OptionSpec, ...] = ()
    subcommands: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return " ".join(self.path)

    @property
    def takes_paths(self) -> bool:
        return any(positional.is_path for positional in self.positionals)

    @property
    def words(self) -> tuple[str, ...]:
        """Words that may stand at the place of a positional argument, except paths."""
        choices = tuple(choice for positional in self.positionals for choice in positional.choices)
        return (*self.subcommands, *choices)

    @property
    def option_names(self) -> tuple[str, ...]:
        return tuple(name for option in self.options for name in option.names)


def value_cases(spec: CommandSpec, choices_setting: Callable[[Sequence[str]], str]) -> list[str]:
    """Return the branches of a shell's `case` that set the values of options, for bash and zsh."""
    cases = []
    for option in spec.options:
        if option.takes_value:
            pattern = "|".join(shlex.quote(f"{spec.key} {name}") for name in option.names)
            setting = "value_is_path=yes" if option.is_path else choices_setting(option.choices)
            cases.append(f"        {pattern}) {setting} ;;")
    return cases


def command_specs(commands: Mapping[str, tuple[str, str]]) -> list[CommandSpec]:
    """Return the commands and their sub-commands; `commands` has module and summary of each by name."""
    specs: list[CommandSpec] = []
    for name, (module, summary) in commands.items():
        specs += _specs(import_module(module).parser(), (name,), summary)
    return specs


def _specs(parser: argparse.ArgumentParser, path: tuple[str, ...], text: str) -> Iterator[CommandSpec]:
    """Yield the specification of a parser, then those of its sub-commands."""
    subparsers = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    children = {name: child for action in subparsers for name, child in action.choices.items()}
    texts = {choice.dest: choice.help or "" for action in subparsers for choice in action._choices_actions}
    actions = [action for action in parser._actions if action not in subparsers and action.help != argparse.SUPPRESS]
    yield CommandSpec(
        path,
        text,
        tuple(_option(action) for action in actions if action.option_strings),
        tuple(_option(action) for action in actions if not action.option_strings),
        tuple(children),
    )
    for name, child in children.items():
        yield from _specs(child, (*path, name), _short(texts.get(name, "")))


def _option(action: argparse.Action) -> OptionSpec:
    shown = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    choices = tuple(str(choice) for choice in action.choices or ())
    is_path = not choices and _NAMES_OF_PATHS.search(shown) is not None
    return OptionSpec(tuple(action.option_strings), _short(action.help or ""), action.nargs != 0, choices, is_path)


def _short(text: str) -> str:
    """Return the beginning of a help text on one line."""
    line = " ".join(text.replace("%%", "%").split())
    return line if len(line) <= _LONGEST_HELP else line[: _LONGEST_HELP - 1].rsplit(" ", 1)[0] + "…"
