"""Build of torch: version, accelerators that it finds, and backends of `torch.distributed`.

torch is imported here only, and an import that fails is part of the result.
"""

from dataclasses import dataclass
from types import ModuleType

_BACKENDS = ("gloo", "nccl", "xccl", "ucc", "mpi")


@dataclass(frozen=True)
class Device:
    """Accelerator; memory in bytes, None where torch does not report it."""

    name: str
    description: str
    free_memory: int | None
    total_memory: int | None


@dataclass(frozen=True)
class TorchBuild:
    """Build of torch; `version` is None if it cannot be imported, and `error` says why."""

    version: str | None
    built_for: str
    """Accelerator platform of the build, such as "CUDA 12.8", or "CPU"."""
    devices: tuple[Device, ...]
    backends: tuple[str, ...]
    error: str | None

    @property
    def problem(self) -> str | None:
        """Why this build cannot be used, as a sentence; None if it can."""
        if self.version is None:
            return f"torch cannot be imported: {self.error}. Install a build for this machine."
        if "gloo" not in self.backends:
            return "This build of torch has no gloo backend, which several ranks need."
        return None

    @property
    def warning(self) -> str | None:
        """What limits the use of accelerators, as a sentence; None if nothing does."""
        if self.version is None:
            return None
        if self.error is not None:
            return f"torch found accelerators but cannot use them: {self.error}."
        if self.built_for != "CPU" and not self.devices:
            return f"torch is built for {self.built_for}, but finds no device: check the driver, or train on the CPU."
        return None


def inspect_torch() -> TorchBuild:
    """Import torch and return what it can use."""
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError) as error:
        # OSError: a shared library that torch needs is missing.
        return TorchBuild(None, "", (), (), _one_line(error))
    devices: tuple[Device, ...] = ()
    problem: str | None = None
    try:
        devices = _devices(torch)
    except (RuntimeError, AssertionError) as error:
        # Drivers that do not fit the build.
        problem = _one_line(error)
    return TorchBuild(torch.__version__, _platform(torch), devices, _backends(dist), problem)


def _platform(torch: ModuleType) -> str:
    for label, version in (("CUDA", torch.version.cuda), ("ROCm", torch.version.hip), ("XPU", torch.version.xpu)):
        if version is not None:
            return f"{label} {version}"
    return "Metal" if torch.backends.mps.is_built() else "CPU"


def _devices(torch: ModuleType) -> tuple[Device, ...]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return ()
    module = torch.get_device_module(accelerator)
    return tuple(_device(module, accelerator.type, index) for index in range(torch.accelerator.device_count()))


def _device(module: ModuleType, kind: str, index: int) -> Device:
    description = module.get_device_name(index) if hasattr(module, "get_device_name") else kind
    free, total = module.mem_get_info(index) if hasattr(module, "mem_get_info") else (None, None)
    return Device(f"{kind}:{index}", description, free, total)


def _backends(dist: ModuleType) -> tuple[str, ...]:
    if not dist.is_available():
        return ()
    return tuple(name for name in _BACKENDS if getattr(dist, f"is_{name}_available", lambda: False)())


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
