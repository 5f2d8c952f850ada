"""The functions of `torch._C` that a CUDA build has and a CPU build lacks, over the rehearsal device."""

import enum
import sys
from collections.abc import Callable
from typing import Any

import torch

from tests.support.rehearsal.activation import native

DEVICE_NAME = "Rehearsal device"
CAPABILITY = (9, 0)
_CUDA_DEVICE_TYPE = 1


def install() -> None:
    """Add the functions and types to `torch._C`, before `torch.cuda` is imported."""
    additions: dict[str, Any] = {
        "_CudaDeviceProperties": DeviceProperties,
        "_CudaStreamBase": StreamBase,
        "_CudaEventBase": EventBase,
        "_CUDAGraph": _unsupported("_CUDAGraph"),
        "_graph_pool_handle": _unsupported("_graph_pool_handle"),
        "_cudart": Runtime(),
        "_has_cuda": True,
    }
    for function in FUNCTIONS:
        additions[f"_cuda_{function.__name__}"] = function
    for name, value in additions.items():
        setattr(torch._C, name, value)


class DeviceProperties:
    """Properties of every rehearsal device."""

    def __init__(self) -> None:
        self.name = DEVICE_NAME
        self.major, self.minor = CAPABILITY
        self.total_memory: int = native().memory_info(0)[1]
        self.multi_processor_count = 132
        self.warp_size = 32
        self.max_threads_per_multi_processor = 2048
        self.max_threads_per_block = 1024
        self.regs_per_multiprocessor = 65536
        self.shared_memory_per_block = 48 << 10
        self.shared_memory_per_block_optin = 227 << 10
        self.shared_memory_per_multiprocessor = 228 << 10
        self.L2_cache_size = 50 << 20
        self.is_integrated = self.is_multi_gpu_board = False
        self.gcnArchName = ""
        self.uuid = "rehearsal"


class StreamBase(torch.Stream):
    """Base class of `torch.cuda.Stream`."""

    def __new__(
        cls,
        priority: int = 0,
        stream_id: int | None = None,
        device_index: int | None = None,
        device_type: int = _CUDA_DEVICE_TYPE,
        stream_ptr: int = 0,
    ) -> "StreamBase":
        if stream_id is not None and device_index is not None:
            return super().__new__(cls, stream_id=stream_id, device_index=device_index, device_type=device_type)
        return super().__new__(cls, device=torch.device("cuda", getDevice()), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    @property
    def priority(self) -> int:
        return 0


class EventBase(torch.Event):
    """Base class of `torch.cuda.Event`."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> "EventBase":
        return super().__new__(cls, device=torch.device("cuda", getDevice()), enable_timing=enable_timing)

    @property
    def cuda_event(self) -> int:
        return self.event_id


class Runtime:
    """The part of the CUDA runtime that `torch.cuda.cudart()` gives."""

    class cudaError(enum.IntEnum):
        success = 0

    def cudaMemGetInfo(self, device: int) -> tuple[int, int]:
        free, total = native().memory_info(device)
        return free, total

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        native().register_host(address, num_bytes)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        native().unregister_host(address)
        return 0

    def cudaGetErrorString(self, error: int) -> str:
        return "no error"

    def cudaProfilerStart(self) -> int:
        return 0

    def cudaProfilerStop(self) -> int:
        return 0


def _unsupported(name: str) -> type:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"the rehearsal device has no {name}: CUDA graphs need a real one")

    return type(name, (), {"__new__": refuse})


# --- functions of torch._C, each with the prefix _cuda_


def init() -> None:
    """Complete `torch.cuda` at its first use."""
    module = sys.modules["torch.cuda"]
    properties = DeviceProperties()
    module._get_device_properties = lambda device: properties  # type: ignore[attr-defined]
    module.default_generators = tuple(map(native().generator_of, range(getDeviceCount())))  # type: ignore[attr-defined]
    _complete_storages()


def getDeviceCount() -> int:
    return int(native().device_count())


def isInBadFork() -> bool:
    return bool(native().is_in_bad_fork())


def getDevice() -> int:
    return torch._C._accelerator_getDeviceIndex()


def setDevice(device: int) -> None:
    torch._C._accelerator_setDeviceIndex(device)


def exchangeDevice(device: int) -> int:
    return torch._C._accelerator_exchangeDevice(device) if device >= 0 else -1


def maybeExchangeDevice(device: int) -> int:
    return torch._C._accelerator_maybeExchangeDevice(device) if device >= 0 else -1


def canDeviceAccessPeer(device: int, peer: int) -> bool:
    return True


def getArchFlags() -> None:
    return None


def synchronize() -> None:
    torch._C._accelerator_synchronizeDevice(getDevice())


def getCurrentStream(device: int) -> tuple[int, int, int]:
    stream = torch._C._accelerator_getStream(device)
    return stream.stream_id, stream.device_index, _CUDA_DEVICE_TYPE


def getCurrentRawStream(device: int) -> int:
    return getCurrentStream(device)[0]


def getDefaultStream(device: int) -> tuple[int, int, int]:
    return 0, device, _CUDA_DEVICE_TYPE


def setStream(stream_id: int, device_index: int, device_type: int) -> None:
    torch._C._accelerator_setStream(
        torch.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
    )


def isCurrentStreamCapturing() -> bool:
    return False


def emptyCache() -> None:
    torch._C._accelerator_emptyCache()


def ipc_collect() -> None:
    """Do nothing: processes share no memory."""


def memoryStats(device: int) -> dict[str, Any]:
    return torch._C._accelerator_getDeviceStats(device)


def hostMemoryStats() -> dict[str, Any]:
    return {}


def resetPeakMemoryStats(device: int) -> None:
    torch._C._accelerator_resetPeakStats(device)


def resetAccumulatedMemoryStats(device: int) -> None:
    torch._C._accelerator_resetAccumulatedStats(device)


def setMemoryFraction(fraction: float, device: int) -> None:
    """Do nothing: memory is limited by the host alone."""


def getAllocatorBackend() -> str:
    return "native"


def record_memory_history(*_: Any, **__: Any) -> None:
    """Do nothing: the device keeps no history."""


def record_memory_history_legacy(*_: Any, **__: Any) -> None:
    """Do nothing: the device keeps no history."""


def memorySnapshot(*_: Any) -> dict[str, Any]:
    traces: list[list[Any]] = [[] for _ in range(getDeviceCount())]
    return {"segments": [], "device_traces": traces, "allocator_settings": {}, "external_annotations": []}


def set_sync_debug_mode(mode: int) -> None:
    global _sync_debug_mode
    _sync_debug_mode = mode


def get_sync_debug_mode() -> int:
    return _sync_debug_mode


_sync_debug_mode = 0

FUNCTIONS: tuple[Callable[..., Any], ...] = (
    *(init, getDeviceCount, isInBadFork, getDevice, setDevice, exchangeDevice, maybeExchangeDevice),
    *(canDeviceAccessPeer, getArchFlags, synchronize, getCurrentStream, getCurrentRawStream, getDefaultStream),
    *(setStream, isCurrentStreamCapturing, emptyCache, ipc_collect, memoryStats, hostMemoryStats),
    *(resetPeakMemoryStats, resetAccumulatedMemoryStats, setMemoryFraction, getAllocatorBackend),
    *(record_memory_history, record_memory_history_legacy, memorySnapshot, set_sync_debug_mode, get_sync_debug_mode),
)


def _complete_storages() -> None:
    """Let Python make and resize storages on the device; a CPU build of torch refuses both."""
    storage_class: Any = torch.UntypedStorage
    make, resize = storage_class.__new__, storage_class.resize_

    def new_storage(cls: type, *args: Any, device: Any = None, **options: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return make(cls, *args, **options) if device is None else make(cls, *args, device=device, **options)
        size = args[0] if args and isinstance(args[0], int) else 0
        return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()

    def resized(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        native().resize_storage(self, size)
        return self

    storage_class.__new__ = new_storage
    storage_class.resize_ = resized
