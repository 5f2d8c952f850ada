"""File operation tracer: records every change below a directory, and can kill the process at any of them."""

import builtins
import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

from forgather.ml.checkpoint.files import durable

_UNIQUE = re.compile(r"-[0-9a-f]{8,12}(?=/|$)")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

BEFORE, AFTER = "before", "after"
# After these operations the directory changes visibly at once. For all others, a kill after the operation is equal to a
# kill before the next one.
KINDS_WITH_AFTER = ("rename", "replace", "exchange", "open")


class FileOperations:
    """Wraps functions of `os` for the rest of the process.

    An operation is identified by its kind, file and occurrence, such as `fsync checkpoints #2`. Plain numbers would
    shift when two ranks race to create a directory.
    """

    def __init__(self, root: str, kill_at: str | None = None, when: str = BEFORE) -> None:
        self.seen: list[str] = []
        self._root = os.path.abspath(root)
        self._kill_at, self._when = kill_at, when
        self._counts: Counter[str] = Counter()

    def install(self) -> "FileOperations":
        for name in ("rename", "replace", "mkdir", "unlink", "remove", "rmdir"):
            self._wrap(os, name, "unlink" if name == "remove" else name, self._named_path)
        for name in ("pwrite", "fsync", "ftruncate"):
            self._wrap(os, name, name, lambda args, _: os.readlink(f"/proc/self/fd/{args[0]}"))
        self._wrap(os, "open", "create", self._opened_path)
        self._wrap(builtins, "open", "open", self._opened_file)
        self._wrap(durable, "exchange", "exchange", self._named_path)
        return self

    def _wrap(self, module: Any, name: str, kind: str, path_of: Callable[..., str | None]) -> None:
        real = getattr(module, name)

        def wrapper(*args: Any, **options: Any) -> Any:
            path = path_of(args, options)
            if path is None or not os.path.abspath(path).startswith(self._root):
                return real(*args, **options)
            operation = self._note(kind, path)
            if operation == self._kill_at and self._when == BEFORE:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*args, **options)
            if operation == self._kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(module, name, wrapper)

    def _note(self, kind: str, path: str) -> str:
        relative = os.path.relpath(os.path.abspath(path), self._root)
        text = f"{kind} {_UNIQUE.sub('-*', relative)}"
        self._counts[text] += 1
        self.seen.append(f"{text} #{self._counts[text]}")
        return self.seen[-1]

    @staticmethod
    def _named_path(args: tuple[Any, ...], options: dict[str, Any]) -> str:
        """Return the first path; deleting a tree names its entries relative to an open directory."""
        directory = options.get("dir_fd")
        path = os.fspath(args[0])
        return path if directory is None else os.path.join(os.readlink(f"/proc/self/fd/{directory}"), path)

    @classmethod
    def _opened_path(cls, args: tuple[Any, ...], options: dict[str, Any]) -> str | None:
        return cls._named_path(args, options) if args[1] & _WRITING else None

    @staticmethod
    def _opened_file(args: tuple[Any, ...], options: dict[str, Any]) -> str | None:
        mode = args[1] if len(args) > 1 else options.get("mode", "r")
        is_path = isinstance(args[0], str | os.PathLike)
        return os.fspath(args[0]) if is_path and any(letter in mode for letter in "wax+") else None
