"""Build of the rehearsal device's C++ extension, once for each torch, Python and state of the sources."""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

SOURCES = Path(__file__).parent / "native"
MODULE = "rehearsal_device"
# Optimisation would take minutes, and the device spends its time in kernels of torch.
COMPILE_FLAGS = ("-std=c++20", "-O1", "-g0", "-fPIC", "-w", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO")
LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")
MAX_JOBS = 2


class CannotBuild(Exception):
    """This machine lacks a part of the tool chain; the message names it."""


def cache_folder() -> Path:
    """Return the folder of the extension for this torch, Python and state of the sources; it may not exist yet."""
    parts = [version("torch"), str(sysconfig.get_config_var("SOABI")), *COMPILE_FLAGS]
    digest = hashlib.sha256("\0".join(parts).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "forgather-rehearsal-device" / digest.hexdigest()[:16]


def extension_path(folder: Path) -> Path:
    return folder / f"{MODULE}.so"


def find_compiler() -> str:
    """Find the C++ compiler; raises `CannotBuild` where the compiler or Python's headers are missing."""
    compiler = shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise CannotBuild("no C++ compiler (c++, g++ or clang++) found")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        raise CannotBuild(f"the headers of Python are missing ({header})")
    return compiler


def build() -> Path:
    """Build the extension unless it is in the cache, and return its folder."""
    folder = cache_folder()
    if extension_path(folder).exists():
        return folder
    compiler = find_compiler()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.parent / ".lock"):
        if not extension_path(folder).exists():
            print("Building the rehearsal device: one to three minutes, once.", file=sys.stderr, flush=True)
            _build_into(folder, compiler)
    return folder


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Let one process build at a time."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build_into(folder: Path, compiler: str) -> None:
    """Build in a temporary folder, and rename it at the end."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".building-") as temporary:
        objects = Path(temporary, "objects")
        objects.mkdir()
        with ThreadPoolExecutor(MAX_JOBS) as jobs:
            # The largest files first, so that none of them is alone at the end.
            sources = sorted(SOURCES.glob("*.cpp"), key=lambda path: -_weight(path))
            compiled = list(jobs.map(lambda source: _compile(compiler, source, objects), sources))
        result = Path(temporary, "result")
        result.mkdir()
        _link(compiler, compiled, extension_path(result))
        result.rename(folder)


def _weight(source: Path) -> int:
    return source.read_text().count("torch/csrc")


def _torch_folder() -> Path:
    """Find the folder of torch without importing it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None, "torch is a dependency of the project"
    return Path(spec.origin).parent


def _compile(compiler: str, source: Path, objects: Path) -> Path:
    include = _torch_folder() / "include"
    folders = [include, include / "torch/csrc/api/include", Path(sysconfig.get_path("include"))]
    target = objects / f"{source.stem}.o"
    _run([compiler, *COMPILE_FLAGS, *(f"-I{folder}" for folder in folders), "-c", str(source), "-o", str(target)])
    return target


def _link(compiler: str, objects: Sequence[Path], target: Path) -> None:
    libraries = _torch_folder() / "lib"
    names = [f"-l{name}" for name in LIBRARIES]
    command = [compiler, "-shared", *map(str, objects), f"-L{libraries}", f"-Wl,-rpath,{libraries}", *names]
    _run([*command, "-o", str(target)])


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"building the rehearsal device failed: {' '.join(command)}\n{done.stderr[-8000:]}")
