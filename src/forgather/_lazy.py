"""Lazy imports: names of a package that are imported when they are first used, so that a program pays only for what it needs.

A package declares them for type checkers by imports under `TYPE_CHECKING`, and at run time by two functions:

    __getattr__ = lazily(__name__, homes)
    __dir__ = listing(__name__, homes)
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def lazily(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """The `__getattr__` of a package; `homes` maps each name to the module below the package that defines it."""

    def find(name: str) -> object:
        if name not in homes:
            raise AttributeError(_unknown_message(package, name, homes), name=name, obj=sys.modules[package])
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    return find


def listing(package: str, homes: Mapping[str, str]) -> Callable[[], list[str]]:
    """The `__dir__` of a package: what it has imported so far, and the names that it can import."""
    return lambda: sorted({*vars(sys.modules[package]), *homes})


def _unknown_message(package: str, name: str, homes: Mapping[str, str]) -> str:
    message = f"module {package!r} has no attribute {name!r}"
    if name.startswith("_"):
        # Python itself and its tools ask for many of these.
        return message
    from forgather._suggestions import did_you_mean

    hint = did_you_mean(name, homes)
    return f"{message}.{hint}" if hint else message
