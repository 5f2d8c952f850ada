"""Imports of classes and functions by `class_path`, checks of their keyword arguments, and paths of directories.

Used by all builders. Mistakes raise `UsageError` with the configuration key before anything is built.
"""

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from forgather._suggestions import did_you_mean
from forgather.config.errors import UsageError
from forgather.config.schema import FactorySection


def find_object(path: str, key: str, home: str | None = None) -> Any:
    """Import the object at a dotted path; `home` is the module of names without dots, `key` the key in messages."""
    module_name, _, name = path.rpartition(".")
    module_name = module_name or home or ""
    if not module_name:
        raise UsageError(f"{key}={path!r} has no module: write it as package.module.{path}.")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and not f"{module_name}.".startswith(f"{error.name}."):
            # The module exists but imports a missing module: the traceback is more useful.
            raise
        raise UsageError(f"{key}={path!r}: there is no module {error.name!r}.") from None
    try:
        return getattr(module, name)
    except AttributeError:
        hint = did_you_mean(name, [known for known in dir(module) if not known.startswith("_")])
        raise UsageError(f"{key}={path!r}: {module_name} has no {name!r}.{hint}") from None


def call(path: str, keywords: Mapping[str, Any], key: str, home: str | None = None) -> Any:
    """Call the object at `path` with the keywords, and return its result."""
    function = find_object(path, f"{key}.class_path", home)
    check_keywords(function, keywords, key, num_positional=0)
    return function(**keywords)


def partial(section: FactorySection, key: str) -> Callable[..., Any] | None:
    """Return the callable of a section with its keywords bound, or None; the trainer passes one more argument."""
    if section.class_path is None:
        if section.init_args:
            raise UsageError(f"{key}.init_args={section.init_args!r} has no effect without {key}.class_path.")
        return None
    function = find_object(section.class_path, f"{key}.class_path")
    check_keywords(function, section.init_args, key, num_positional=1)
    return functools.partial(function, **section.init_args)


def check_keywords(
    function: Callable[..., object], keywords: Mapping[str, object], key: str, num_positional: int
) -> None:
    """Raise UsageError for unknown or missing keyword arguments of a callable, before anything is built."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        # Some C functions have no signature; the call itself will report mistakes.
        return
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    for name in keywords:
        if name not in signature.parameters and not takes_any:
            raise UsageError(
                f"{key}.init_args: {_name(function)} takes no {name!r}.{did_you_mean(name, signature.parameters)}"
            )
    try:
        # Placeholders stand for the arguments that the trainer passes.
        signature.bind(*[None] * num_positional, **keywords)
    except TypeError as error:
        raise UsageError(
            f"{key}.init_args: {_name(function)} cannot be called with {dict(keywords)}: {error}."
        ) from None


def require_directory(path: str, key: str) -> str:
    """Return the expanded path of a directory; raise UsageError if it does not exist."""
    if not os.path.isdir(os.path.expanduser(path)):
        raise UsageError(f"{key}={path!r}: there is no such directory (nothing is downloaded; use a local one).")
    return os.path.expanduser(path)


def _name(function: object) -> str:
    return str(getattr(function, "__qualname__", function))
