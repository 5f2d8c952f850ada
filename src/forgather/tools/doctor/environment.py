"""Environment of a machine: Python, packages, devices, backends, disk and memory, with their problems and warnings.

Each value is measured once, and torch is imported by `torch_build` only. `forgather doctor` prints the result.
"""

import os
import platform
import shutil
import sys
from dataclasses import dataclass

from forgather import __version__
from forgather.tools.doctor.packages import ExtraPackage, RequiredPackage, extra_packages, required_packages
from forgather.tools.doctor.torch_build import TorchBuild, inspect_torch

_OLDEST_PYTHON = (3, 11)
_SHARED_MEMORY = "/dev/shm"
_LITTLE_SHARED_MEMORY = 2**30
_LITTLE_DISK = 2**30


@dataclass(frozen=True)
class Space:
    """Total and free bytes of a disk or memory."""

    free: int
    total: int


@dataclass(frozen=True)
class Environment:
    """What is installed and available."""

    forgather: str
    """Version of Forgather."""
    location: str
    """Folder that it is imported from."""
    python: str
    executable: str
    system: str
    num_cpus: int
    """Processors that this process may use."""
    packages: tuple[RequiredPackage, ...]
    extras: tuple[ExtraPackage, ...]
    torch: TorchBuild
    folder: str
    """Folder whose disk was measured."""
    is_writable: bool
    disk: Space
    memory: Space | None
    """None if torch cannot be imported."""
    shared_memory: Space | None
    """None where the system has no such folder."""
    compiler: str | None
    """C++ compiler, for torch.compile on the CPU; nothing else needs it."""

    @property
    def problems(self) -> tuple[str, ...]:
        """One sentence for each reason why Forgather does not work here."""
        found = [package.problem for package in self.packages]
        if not any(package.name == "torch" and package.problem for package in self.packages):
            found.append(self.torch.problem)
        if sys.version_info < _OLDEST_PYTHON:
            found.append(f"Python {self.python} is too old: Forgather needs 3.11 or newer.")
        if not self.is_writable:
            found.append(f"{self.folder} is not writable: change to a directory where you may write.")
        return tuple(sentence for sentence in found if sentence is not None)

    @property
    def warnings(self) -> tuple[str, ...]:
        """One sentence for each thing that limits what can be trained here."""
        found = [self.torch.warning]
        if self.shared_memory is not None and self.shared_memory.total < _LITTLE_SHARED_MEMORY:
            found.append(
                f"{_SHARED_MEMORY} is smaller than 1 GiB, which workers of loaders and ranks use to pass batches: start "
                "the container with more, such as docker run --shm-size=8g."
            )
        if self.disk.free < _LITTLE_DISK:
            found.append(f"The disk of {self.folder} has less than 1 GiB left for checkpoints.")
        return tuple(sentence for sentence in found if sentence is not None)


def inspect_environment(folder: str = os.curdir) -> Environment:
    """Return the environment; `folder` is where checkpoints would be written."""
    folder = os.path.abspath(folder)
    torch_build = inspect_torch()
    return Environment(
        forgather=__version__,
        location=os.path.dirname(os.path.abspath(sys.modules["forgather"].__file__ or "")),
        python=platform.python_version(),
        executable=sys.executable,
        system=platform.platform(),
        num_cpus=_num_cpus(),
        packages=required_packages(),
        extras=extra_packages(),
        torch=torch_build,
        folder=folder,
        is_writable=os.access(folder, os.W_OK | os.X_OK),
        disk=_disk_space(folder),
        memory=_memory() if torch_build.version is not None else None,
        shared_memory=_disk_space(_SHARED_MEMORY) if os.path.isdir(_SHARED_MEMORY) else None,
        compiler=shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++"),
    )


def _num_cpus() -> int:
    # Containers and schedulers restrict processes to some of the processors. macOS cannot tell.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _disk_space(path: str) -> Space:
    usage = shutil.disk_usage(path)
    return Space(usage.free, usage.total)


def _memory() -> Space:
    from forgather.ml.checkpoint.background.memory_plan import free_memory

    return Space(free_memory(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
