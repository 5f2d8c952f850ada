"""A text that every machine with Python has: the source of the standard library."""

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}


def standard_library_documents(max_bytes: int = 4_000_000) -> Iterator[str]:
    """Source files of the standard library, in an order that looks random and is always the same, up to `max_bytes`."""
    folder = Path(sysconfig.get_path("stdlib"))
    names = sorted(_source_files(folder), key=lambda name: hashlib.sha256(name.encode()).digest())
    if not names:
        raise FileNotFoundError(
            f"This Python has no source of its standard library in {folder}. Train on other text: data.files in a "
            "configuration file, or --data.files on the command line together with --data.class_path null."
        )
    num_bytes = 0
    for name in names:
        text = (folder / name).read_text(encoding="utf-8", errors="replace")
        num_bytes += len(text.encode("utf-8", errors="replace"))
        if num_bytes > max_bytes:
            return
        yield text


def _source_files(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*.py"):
        name = path.relative_to(folder)
        if not _NOT_LIBRARY.intersection(name.parts):
            yield name.as_posix()
