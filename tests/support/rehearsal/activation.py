"""Activation of the rehearsal device in this process, while torch is being imported.

Torch decides at import whether it has CUDA and NCCL: `torch.cuda` looks for functions in `torch._C`, and
`torch.distributed` for `ProcessGroupNCCL`. A finder notes the import of each module and supplies the missing parts just
before. From there on torch's own Python code runs, as with real CUDA.
"""

import ctypes
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.support.rehearsal.build import MODULE, extension_path

EXTENSION_VARIABLE = "REHEARSAL_EXTENSION"


def activate() -> None:
    """Make the next `import torch` find CUDA devices and NCCL."""
    assert "torch" not in sys.modules, "the rehearsal device must be activated before torch is imported"
    sys.meta_path.insert(0, _Preparations())


def native() -> Any:
    """Return the C++ extension of the device."""
    return importlib.import_module(MODULE)


class _Preparations(MetaPathFinder):
    """Finds no module itself, but runs a preparation when one is about to be imported."""

    def __init__(self) -> None:
        self._preparations: dict[str, Callable[[], None]] = {
            "torch": _load_library,
            "torch.cuda": _prepare_cuda,
            "torch.distributed.constants": _prepare_nccl,
        }

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        preparation = self._preparations.pop(fullname, None)
        if preparation is not None:
            preparation()
        return None


def _extension() -> Path:
    return extension_path(Path(os.environ[EXTENSION_VARIABLE]))


def _load_library() -> None:
    """Register the device's hooks, guard and kernels. Torch chooses its CUDA hooks once, at their first use."""
    ctypes.CDLL(str(_extension()), ctypes.RTLD_GLOBAL)


def _prepare_cuda() -> None:
    _import_extension()
    from tests.support.rehearsal.cuda_functions import install

    install()


def _import_extension() -> None:
    spec = importlib.util.spec_from_file_location(MODULE, _extension())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    spec.loader.exec_module(module)


def _prepare_nccl() -> None:
    from tests.support.rehearsal.nccl import install

    install()
