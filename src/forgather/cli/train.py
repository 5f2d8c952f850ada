"""`forgather train`: reads the configuration, then trains."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forgather.cli.errors import UsageError
from forgather.cli.manners import share_processors, silence_libraries

if TYPE_CHECKING:
    from forgather.cli.config_parsing import Option
    from forgather.cli.configuration import Configuration

DEMO = Path(__file__).with_name("demo.yaml")


def run(words: Sequence[str]) -> int:
    """Run the command with the words behind its name; returns the exit code."""
    if "-h" in words or "--help" in words:
        from forgather.cli.config_help import help_text

        print(help_text(), end="")
        return 0
    silence_libraries()
    share_processors()
    configuration, is_demo = read_configuration([word for word in words if word != "--print_config"])
    if "--print_config" in words:
        from forgather.cli import config_parsing, yaml_files

        print(yaml_files.dump(config_parsing.to_dict(configuration)), end="")
        return 0
    if is_demo:
        _introduce_demo()
    from forgather.cli.running import train

    return train(configuration, words if is_demo else None)


def read_configuration(words: Sequence[str]) -> "tuple[Configuration, bool]":
    """The configuration that file and options make, and whether it is the demo's."""
    from forgather.cli.config_parsing import ConfigurationParser, split_options

    files, options = split_options(words)
    if len(files) > 1:
        raise UsageError(f"One configuration file at a time: got {', '.join(files)}. Options begin with two dashes.")
    parser = ConfigurationParser()
    if files:
        parser.read_file(os.path.expanduser(files[0]), files[0])
    else:
        parser.read_file(str(DEMO), DEMO.name)
    for option in options:
        parser.override(_in_full(option))
    return parser.configuration(), not files


def _in_full(option: "Option") -> "Option":
    """`--trainer KIND` is short for `--trainer.kind KIND`."""
    from forgather.cli.config_parsing import Option

    return Option("trainer.kind", option.text) if option.key == "trainer" else option


def _introduce_demo() -> None:
    """Said before the libraries are imported, which takes some seconds."""
    from rich.text import Text

    from forgather.ml.trainer.callbacks.console import get_console

    title = Text("forgather demo", style="bold")
    text = Text("a small Llama learns the source of Python's standard library, byte by byte")
    get_console().print(title + Text("  ") + text, soft_wrap=True)
    sys.stdout.flush()
