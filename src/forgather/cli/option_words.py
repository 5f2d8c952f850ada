"""Keys of the configuration as words of a command line, for commands that also have options of their own.

Imports no torch. `config.parser` parses the words that `take_configuration_words` finds; the parser of
`add_configuration_keys` only lists the keys, for completion.
"""

from collections.abc import Sequence

from forgather.cli.command_line import CommandParser
from forgather.config.help import configuration_keys
from forgather.config.schema import PLAIN_KEYS, SECTIONS


def take_configuration_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into options that set keys of the configuration, with their values, and other words."""
    taken: list[str] = []
    others: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not _sets_key(word):
            others.append(word)
            continue
        taken.append(word)
        if "=" not in word and rest and not rest[0].startswith("--"):
            taken.append(rest.pop(0))
    return taken, others


def _sets_key(word: str) -> bool:
    if not word.startswith("--"):
        return False
    first = word[2:].partition("=")[0].partition(".")[0].removesuffix("+")
    return first in {"args", *SECTIONS, *PLAIN_KEYS}


def add_configuration_keys(parser: CommandParser) -> None:
    """Add all keys of a configuration as options, with their choices and help texts."""
    group = parser.add_argument_group("configuration")
    for key in configuration_keys():
        text = key.text.replace("%", "%%")
        group.add_argument(f"--{key.name}", choices=key.choices or None, metavar="VALUE", help=text)
