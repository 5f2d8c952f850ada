"""Savers and loaders that the checkpoint benchmark compares, and the functions that measure them.

Each `measure_...` function runs in a fresh process. All processes build the same model in the same way. The first
access to fresh memory is slow (page faults), and it must not fall into the measured time of only some contenders.
"""

import contextlib
import json
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from forgather.ml.checkpoint.components import SharingPattern, StateComponent
from forgather.ml.checkpoint.coordinator import CheckpointCoordinator
from forgather.ml.checkpoint.encoding.digest import state_digests
from forgather.ml.distributed import StaticDistributedEnvironment

# DCP warns at every save and load in a single process, but here a single process is intended.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

PRELOADED_MODULES = [
    CheckpointCoordinator.__module__,
    "rich.table",
    "safetensors.torch",
    "torch.distributed.checkpoint.state_dict",
]

_WIDTH = 1024
_VOCABULARY = 16 * 1024
_BYTES_PER_PARAMETER = 3 * 4
_MOMENTS = ("exp_avg", "exp_avg_sq")
# The content differs between tensors and between pages, and costs no more than a copy.
_PATTERN_LENGTH = 2**20 - 3
_PATTERN_SHIFT = 7919
_CHECKED_STRIDE = 4099


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.out = nn.Linear(_WIDTH, _WIDTH)
        self.up = nn.Linear(_WIDTH, 4 * _WIDTH)
        self.down = nn.Linear(4 * _WIDTH, _WIDTH)


class _Model(nn.Module):
    """Tensors of a small transformer, without a forward pass."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(_WIDTH)


@dataclass
class Training:
    """A model and its optimizer."""

    model: nn.Module
    optimizer: torch.optim.AdamW

    @classmethod
    def build(cls, num_bytes: int) -> "Training":
        """Return weights of a third of `num_bytes` in untouched memory, and an optimizer without moments."""
        num_parameters = num_bytes / _BYTES_PER_PARAMETER - _VOCABULARY * _WIDTH
        with torch.device("meta"):
            model = _Model(max(1, round(num_parameters / (12 * _WIDTH**2))))
        model.to_empty(device="cpu")
        return cls(model, torch.optim.AdamW(model.parameters()))

    @classmethod
    def running(cls, num_bytes: int) -> "Training":
        """Return a training that has moments and content, ready to save."""
        training = cls.build(num_bytes)
        training.create_moments()
        training.fill()
        return training

    @classmethod
    def resuming(cls, num_bytes: int) -> "Training":
        """Return a training with initialised weights and no moments, ready to load."""
        training = cls.build(num_bytes)
        for tensor in training.tensors():
            tensor.zero_()
        return training

    def create_moments(self) -> None:
        for parameter in self.model.parameters():
            self.optimizer.state[parameter] = {
                "step": torch.tensor(1.0),
                **{name: torch.empty_like(parameter.data) for name in _MOMENTS},
            }

    def moments(self) -> list[Tensor]:
        states = [self.optimizer.state.get(parameter, {}) for parameter in self.model.parameters()]
        return [state[name] for state in states if state for name in _MOMENTS]

    def tensors(self) -> list[Tensor]:
        return [parameter.data for parameter in self.model.parameters()] + self.moments()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def fill(self) -> None:
        pattern = _pattern().repeat(2)
        for number, tensor in enumerate(self.tensors()):
            shifted = pattern[number * _PATTERN_SHIFT % _PATTERN_LENGTH :]
            for part in tensor.view(-1).split(_PATTERN_LENGTH):
                part.copy_(shifted[: len(part)])

    def spoil(self) -> None:
        """Overwrite the values that `check` compares, so that a load has to restore them."""
        for tensor in self.tensors():
            tensor.view(-1)[::_CHECKED_STRIDE] = -1.0

    def check(self) -> None:
        """Raise RuntimeError unless the content is the pattern of `fill`, at one position in every few pages."""
        pattern, tensors = _pattern(), self.tensors()
        assert len(tensors) == (1 + len(_MOMENTS)) * len(list(self.model.parameters()))
        for number, tensor in enumerate(tensors):
            places = torch.arange(0, tensor.numel(), _CHECKED_STRIDE)
            expected = pattern[(places + number * _PATTERN_SHIFT) % _PATTERN_LENGTH]
            if not torch.equal(tensor.view(-1)[places], expected):
                raise RuntimeError(f"Tensor {number} has other content after the load than before the save.")


def _pattern() -> Tensor:
    return torch.rand(_PATTERN_LENGTH, generator=torch.Generator().manual_seed(0))


# --- Forgather


def _coordinator(training: Training) -> CheckpointCoordinator:
    components = [
        StateComponent("model", training.model, SharingPattern.REPLICATED),
        StateComponent("optimizer", training.optimizer, SharingPattern.REPLICATED),
    ]
    return CheckpointCoordinator(components, {}, StaticDistributedEnvironment(), ".", model=training.model)


def _save_ours(training: Training, directory: Path) -> None:
    _coordinator(training).save_checkpoint(str(directory / "checkpoint-1"))


def _load_ours(training: Training, directory: Path) -> None:
    _coordinator(training).load_checkpoint(str(directory / "checkpoint-1"))


# --- torch.save


def _save_torch(training: Training, directory: Path) -> None:
    torch.save(training.state(), directory / "state.pt")


def _load_torch(training: Training, directory: Path) -> None:
    training.load(torch.load(directory / "state.pt", weights_only=True))


def _load_torch_mapped(training: Training, directory: Path) -> None:
    state = torch.load(directory / "state.pt", weights_only=True, mmap=True)
    _own_moments(state["optimizer"])
    training.load(state)


def _own_moments(optimizer_state: dict[str, Any]) -> None:
    """Copy the moments out of the mapped file: the optimizer keeps the tensors that it loads."""
    for state in optimizer_state["state"].values():
        state.update({name: value.clone() for name, value in state.items()})


# --- safetensors


def _save_safetensors(training: Training, directory: Path) -> None:
    state = training.state()
    tensors = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    for number, moments in state["optimizer"]["state"].items():
        tensors |= {f"optimizer.{number}.{name}": tensor for name, tensor in moments.items()}
    groups = {"param_groups": json.dumps(state["optimizer"]["param_groups"])}
    safetensors.torch.save_file(tensors, directory / "state.safetensors", metadata=groups)


def _load_safetensors(training: Training, directory: Path) -> None:
    path = directory / "state.safetensors"
    with safetensors.safe_open(path, framework="pt") as file:
        groups = json.loads(file.metadata()["param_groups"])
    model_state: dict[str, Tensor] = {}
    optimizer_state: dict[int, dict[str, Tensor]] = {}
    for full_name, tensor in safetensors.torch.load_file(path).items():
        component, name = full_name.split(".", 1)
        if component == "model":
            model_state[name] = tensor
        else:
            number, name = name.split(".")
            optimizer_state.setdefault(int(number), {})[name] = tensor
    state = {"model": model_state, "optimizer": {"state": optimizer_state, "param_groups": groups}}
    _own_moments(state["optimizer"])
    training.load(state)


# --- torch.distributed.checkpoint


def _save_dcp(training: Training, directory: Path, num_threads: int = 1) -> None:
    model_state, optimizer_state = get_state_dict(training.model, training.optimizer)
    writer = dcp.FileSystemWriter(directory, sync_files=True, thread_count=num_threads)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, storage_writer=writer, no_dist=True)


def _save_dcp_in_two_threads(training: Training, directory: Path) -> None:
    _save_dcp(training, directory, num_threads=2)


def _load_dcp(training: Training, directory: Path) -> None:
    """Load into existing tensors; `get_state_dict` first creates the moments by a step with zero gradients."""
    model_state, optimizer_state = get_state_dict(training.model, training.optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, storage_reader=dcp.FileSystemReader(directory), no_dist=True)
    set_state_dict(
        training.model,
        training.optimizer,
        model_state_dict=state["model"],  # type: ignore[arg-type]
        optim_state_dict=state["optimizer"],  # type: ignore[arg-type]
    )


# --- raw bytes


def _save_raw(training: Training, directory: Path) -> None:
    with open(directory / "state.bin", "xb", buffering=0) as file:
        for tensor in training.tensors():
            _transfer(file.write, tensor)


def _load_raw(training: Training, directory: Path) -> None:
    if not training.optimizer.state:
        training.create_moments()
    with open(directory / "state.bin", "rb", buffering=0) as file:
        for tensor in training.tensors():
            _transfer(file.readinto, tensor)


def _transfer(transfer: Callable[[memoryview], int | None], tensor: Tensor) -> None:
    memory = memoryview(tensor.view(-1).numpy()).cast("B")  # type: ignore[arg-type]
    while len(memory):
        count = transfer(memory)
        if not count:
            raise EOFError(f"The file ends {len(memory)} bytes early.")
        memory = memory[count:]


@dataclass(frozen=True)
class Saver:
    """Save function; `is_durable` if files and directory entries are on disk when it returns."""

    name: str
    save: Callable[[Training, Path], None]
    is_durable: bool = False


@dataclass(frozen=True)
class Loader:
    """Load function for the files of `saver`."""

    name: str
    saver: str
    load: Callable[[Training, Path], None]


OURS = "Forgather"
SAVERS = [
    Saver(OURS, _save_ours, is_durable=True),
    Saver("torch.save", _save_torch),
    Saver("safetensors", _save_safetensors),
    Saver("DCP", _save_dcp),
    Saver("DCP, 2 threads", _save_dcp_in_two_threads),
    Saver("raw bytes", _save_raw),
]
LOADERS = [
    Loader(OURS, OURS, _load_ours),
    Loader("torch.load", "torch.save", _load_torch),
    Loader("torch.load, mmap", "torch.save", _load_torch_mapped),
    Loader("safetensors", "safetensors", _load_safetensors),
    Loader("DCP", "DCP", _load_dcp),
    Loader("raw bytes", "raw bytes", _load_raw),
]


@dataclass(frozen=True)
class Measurement:
    """One save or load: seconds until the call returned and until the data was durable, and bytes of added memory.

    `private_bytes` is the peak of private memory. `resident_bytes` also counts mapped files.
    """

    blocked: float
    durable: float
    num_bytes: int
    private_bytes: int
    resident_bytes: int


def measure_saves(name: str, num_bytes: int, directory: Path) -> list[Measurement]:
    """Measure the first and the second save of this process; leave the files of the second in `directory`."""
    saver = next(one for one in SAVERS if one.name == name)
    training = Training.running(num_bytes)
    measurements = []
    for _ in range(2):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        os.sync()
        with _PeakMemory() as memory:
            start = time.perf_counter()
            saver.save(training, directory)
            blocked = time.perf_counter() - start
            if not saver.is_durable:
                _make_durable(directory)
            durable = time.perf_counter() - start
        measurements.append(
            Measurement(blocked, durable, training.num_bytes, memory.private_bytes, memory.resident_bytes)
        )
    return measurements


def measure_loads(name: str, num_bytes: int, directory: Path, is_cold: bool) -> list[Measurement]:
    """Measure the first and the second load of this process, which starts with weights and without moments."""
    loader = next(one for one in LOADERS if one.name == name)
    training = Training.resuming(num_bytes)
    measurements = []
    for _ in range(2):
        training.spoil()
        if is_cold:
            forget_files(directory)
        else:
            _read_files(directory)
        with _PeakMemory() as memory:
            start = time.perf_counter()
            loader.load(training, directory)
            seconds = time.perf_counter() - start
        training.check()
        measurements.append(
            Measurement(seconds, seconds, training.num_bytes, memory.private_bytes, memory.resident_bytes)
        )
    return measurements


def measure_digests(num_bytes: int) -> dict[str, float]:
    """Return bytes per second in one thread: digests of a state, and the plain hash of one buffer."""
    training = Training.running(num_bytes)
    size = training.num_bytes
    state = training.state()
    start = time.perf_counter()
    state_digests(state)
    digests = size / (time.perf_counter() - start)
    del training, state
    buffer: Any = torch.ones(size, dtype=torch.uint8).numpy()
    start = time.perf_counter()
    xxhash.xxh3_128_digest(buffer)
    return {"state_digests": digests, "xxh3_128 of one buffer": size / (time.perf_counter() - start)}


def _make_durable(directory: Path) -> None:
    for path in [*_files(directory), directory, directory.parent]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def forget_files(directory: Path) -> str:
    """Drop the files from the page cache, and return the method used."""
    os.sync()
    with contextlib.suppress(PermissionError):
        Path("/proc/sys/vm/drop_caches").write_text("3")
        return "drop_caches"
    for path in _files(directory):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return "posix_fadvise"


def _read_files(directory: Path) -> None:
    buffer = bytearray(8 * 2**20)
    for path in _files(directory):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in directory.rglob("*") if path.is_file())


class _PeakMemory:
    """Context manager that measures the peak memory of this process above its memory at the start."""

    private_bytes = 0
    resident_bytes = 0

    def __enter__(self) -> "_PeakMemory":
        # Reset the high-water mark of the kernel to the memory that is resident now.
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _memory_status()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        self._sample()
        self.resident_bytes = _memory_status()["VmHWM"] - self._before["VmRSS"]

    def _watch(self) -> None:
        while not self._stopped.wait(0.01):
            self._sample()

    def _sample(self) -> None:
        # Anonymous buffers from Python's mmap count as shared memory.
        now = _memory_status()
        added = sum(now[name] - self._before[name] for name in ("RssAnon", "RssShmem"))
        self.private_bytes = max(self.private_bytes, added)


def _memory_status() -> dict[str, int]:
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}
