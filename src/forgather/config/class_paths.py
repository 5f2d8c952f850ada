"""Imports of classes and functions by `class_path`, checks of their keyword arguments, and paths of directories.

Used by all builders. Mistakes raise `UsageError` with the configuration key before anything is built. Importing this
module does not import torch.
"""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from forgather._suggestions import did_you_mean
from forgather.config.errors import UsageError

if TYPE_CHECKING:
    from forgather.config.schema import FactorySection

SAFE_PATH = "PYTHONSAFEPATH"
"""Environment variable with which Python does not search the current directory for modules."""
SAFE_BY_DEFAULT = "forgather"
"""Value of the variable where the command line has set it, and the user has not."""
_user_folders: list[str] = []
"""Folder with modules of the user, which a `class_path` may name; empty until a command allows it."""


def allow_modules_in(folder: str) -> None:
    """Let a `class_path` name the modules in a folder. Nothing else is imported from it, as long as none does."""
    _user_folders[:] = [folder]


def find_object(path: str, key: str, home: str | None = None) -> Any:
    """Import the object at a dotted path; `home` is the module of names without dots, `key` the key in messages."""
    module_name, _, name = path.rpartition(".")
    module_name = module_name or home or ""
    if not module_name:
        raise UsageError(f"{key}={path!r} has no module: write it as package.module.{path}.")
    try:
        module = _import(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and not f"{module_name}.".startswith(f"{error.name}."):
            # The module exists but imports a missing module: the traceback is more useful.
            raise
        raise UsageError(f"{key}={path!r}: there is no module {error.name!r}.{_shadowed(module_name)}") from None
    try:
        return getattr(module, name)
    except AttributeError:
        hint = did_you_mean(name, [known for known in dir(module) if not known.startswith("_")])
        raise UsageError(f"{key}={path!r}: {module_name} has no {name!r}.{_shadowed(module_name) or hint}") from None


def _import(name: str) -> ModuleType:
    package = name.partition(".")[0]
    # Installed libraries come first, and a folder is added only for a module that it alone can have. Otherwise a file
    # such as json.py or yaml.py in the current directory would run in place of the library.
    if _user_folders and package not in sys.modules and find_spec(package) is None:
        sys.path += [folder for folder in _user_folders if folder not in sys.path]
        if os.environ.get(SAFE_PATH) == SAFE_BY_DEFAULT:
            # The user's code may start programs that need Python's usual search.
            del os.environ[SAFE_PATH]
    return import_module(name)


def _shadowed(name: str) -> str:
    """Return a sentence about a module of the user that an installed library of the same name hides, or ""."""
    package = name.partition(".")[0]
    library = getattr(sys.modules.get(package), "__file__", None) or "part of Python"
    for folder in _user_folders:
        own = next((one for one in (f"{package}.py", package) if os.path.exists(os.path.join(folder, one))), None)
        if own is not None and package in sys.modules and not library.startswith(os.path.join(folder, "")):
            return (
                f" The installed library {package!r} ({library}) hides {own} of {folder}: installed libraries come first. "
                "Give your module another name, and use that name in the configuration."
            )
    return ""


def call(path: str, keywords: Mapping[str, Any], key: str, home: str | None = None) -> Any:
    """Call the object at `path` with the keywords, and return its result."""
    function = find_object(path, f"{key}.class_path", home)
    check_keywords(function, keywords, key, num_positional=0)
    return function(**keywords)


def partial(section: "FactorySection", key: str) -> Callable[..., Any] | None:
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
