"""Page of all commands: the help of each, from the parsers of the command line."""

import contextlib
import io
import os
from importlib import import_module

from forgather.cli import main

_INTRODUCTION = """\
# Commands

Generated from `--help` of every command. The page [command line](../cli.md) shows how they are used, and
[exit codes](exit-codes.md) what they return. `--debug` shows the traceback of an error, with every command.

"""
_ARGUMENTS = "args: Training arguments:"


def page() -> str:
    """Return the page in Markdown."""
    os.environ["COLUMNS"] = "100"
    parts = [_INTRODUCTION]
    for name, command in main.COMMANDS.items():
        text = _help(command.module)
        note = ""
        if _ARGUMENTS in text:
            text = text.partition(_ARGUMENTS)[0]
            note = "The keys of `args` are the [training arguments](arguments.md).\n\n"
        summary = command.summary[0].upper() + command.summary[1:]
        parts.append(f"## `forgather {name}`\n\n{summary}.\n\n```text\n{text.rstrip()}\n```\n\n{note}")
    return "".join(parts)


def _help(module: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        import_module(module).run(["--help"])
    return printed.getvalue()
