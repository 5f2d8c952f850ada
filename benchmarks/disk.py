"""Disk of a benchmark that writes files: a working directory on it, its file system and its free space."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_GB = 1e9


@contextlib.contextmanager
def directory_on_disk(parent: str, prefix: str, num_bytes: int) -> Iterator[Path]:
    """Create a temporary directory with space for `num_bytes`; exit if it is in memory or too small."""
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as directory:
        # The default directory is in a working tree, and git must not offer gigabytes of test files for a commit.
        Path(directory, ".gitignore").write_text("*\n")
        _require_disk(directory, num_bytes)
        yield Path(directory)


def _require_disk(directory: str, num_bytes: int) -> None:
    kind = file_system(directory)
    if kind in ("tmpfs", "ramfs"):
        raise SystemExit(f"The working directory is on {kind}, which is memory. Set --dir to a directory on a disk.")
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise SystemExit(
            f"{free / _GB:.1f} GB are free, but the files need {num_bytes / _GB:.1f} GB. Set --dir to another "
            "directory, or reduce their size."
        )


def file_system(directory: str) -> str:
    """Return the file system type of a directory."""
    device = os.stat(directory).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, source = line.partition(" - ")
        if mount.split()[2] == number:
            return source.split()[0]
    return "unknown file system"
