"""Text dataset of the demo: the source files of Python's standard library.

Named as `data.class_path` in demo.yaml. The order of the files is the same on every machine with the same Python.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}


def standard_library_documents(max_bytes: int = 4_000_000) -> Iterator[str]:
    """Yield source files of the standard library in a fixed shuffled order, up to `max_bytes`."""
    folder = Path(sysconfig.get_path("stdlib"))
    # Sorting by a hash shuffles without a random generator: a prefix of the list is a sample of all packages.
    names = sorted(_source_files(folder), key=lambda name: hashlib.sha256(name.encode()).digest())
    if not names:
        raise FileNotFoundError(
            f"This Python has no source files of its standard library in {folder}. Train on other text: set data.files in "
            "a configuration file, or pass --data.files together with --data.class_path null."
        )
    num_bytes = 0
    for name in names:
        text = (folder / name).read_text(encoding="utf-8", errors="replace")
        num_bytes += len(text.encode("utf-8", errors="replace"))
        if num_bytes > max_bytes:
            return
        yield text


def _source_files(folder: Path) -> Iterator[str]:
    # Excluded folders are not entered: site-packages may have many times the files of the library.
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _NOT_LIBRARY]
        for name in names:
            if name.endswith(".py"):
                yield Path(parent, name).relative_to(folder).as_posix()
