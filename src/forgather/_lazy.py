"""Lazy imports (PEP 562): a package imports a public name when the name is first used.

Programs and help pages that do not need torch therefore start without it. Packages declare the names for type checkers
with imports under `TYPE_CHECKING`, and at run time with the two functions below.
"""

import gc
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType


def lazily(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """Return the `__getattr__` of a package.

    `homes` maps each name to the module, relative to the package, that defines it:

        __getattr__ = lazily(__name__, homes)
        __dir__ = listing(__name__, homes)
    """

    def find(name: str) -> object:
        if name not in homes:
            raise AttributeError(_unknown_message(package, name, homes), name=name, obj=sys.modules[package])
        return getattr(import_quickly(f"{package}.{homes[name]}"), name)

    return find


def import_quickly(name: str) -> ModuleType:
    """Import a module without garbage collection meanwhile.

    Imports create many objects and no garbage. The collector would go through all of them again and again, which took
    a fifth of the time from the start of the process to the first training step.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return import_module(name)
    finally:
        if was_enabled:
            gc.enable()


def listing(package: str, homes: Mapping[str, str]) -> Callable[[], list[str]]:
    """Return the `__dir__` of a package: its current attributes and the names that it can import."""
    return lambda: sorted({*vars(sys.modules[package]), *homes})


def _unknown_message(package: str, name: str, homes: Mapping[str, str]) -> str:
    message = f"module {package!r} has no attribute {name!r}"
    if name.startswith("_"):
        # Python and its tools probe many underscored names, so a suggestion would only cost time.
        return message
    from forgather._suggestions import did_you_mean

    hint = did_you_mean(name, homes)
    return f"{message}.{hint}" if hint else message
