"""Trial build of a model from a stored description, in a forked process with limited memory and time.

A description such as config.json may come from a stranger, and a number in it decides how many layers a constructor
builds, how large they are, or how long a list of a configuration class becomes. Which number that is depends on the
architecture. So the model is built first on the meta device, by a process that can do no harm, with limits that follow
from the stored weights. They are far above the needs of a model that fits its weights.
"""

import contextlib
import itertools
import json
import os
import resource
import select
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from forgather._terminal_text import printable_line
from forgather.ml.checkpoint.encoding import strict_json
from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.checkpoint.files.regular_files import read_small_file
from forgather.ml.checkpoint.weights.location import locate_weights
from forgather.ml.no_init_weights import no_init_weights

MODEL_CONFIG = "config.json"
_MODULES, _MODULES_PER_TENSOR = 5000, 10
"""Layers, activations and containers. Architectures of transformers have one to three per stored tensor."""
_SECONDS, _SECONDS_PER_TENSOR = 10.0, 0.02
"""Processor time, for constructors that loop without a module. Those of transformers take 0.1 to 0.3 ms per tensor, and
their first call imports libraries."""
_BYTES, _BYTES_PER_TENSOR = 256 * 2**20, 64 * 2**10
_MOST_GROWTH = 16
"""Bytes in memory per stored byte: float8 becomes float32, tied tensors are stored once, some are not stored."""
_MOST_GROWTH_QUANTISED = 64
"""The same for a configuration with a quantisation, whose weights may have a single bit."""
_BYTES_OF_BUFFERS = 2**30
"""Bytes of buffers that are never stored, such as causal masks: they grow with the positions, not with the weights. Four
layers of GPT-Neo with 16,384 positions have as many."""
_BYTES_WITHOUT_INDEX = 2**20
"""Stored bytes that stand for one tensor in a directory whose tensors cannot be counted."""
_WAIT_FACTOR, _WAIT_SECONDS = 2, 30
_NUM_SHOWN = 3
_TOO_LARGE = ("allocate memory", "not enough memory", "overflow", "too large")
"""Parts of messages of torch for sizes that no memory or number can hold."""

_Verdict = Literal["fits", "memory", "modules", "time", "unknown"]


@dataclass(frozen=True)
class _Limits:
    """Most that the construction of a model may take."""

    tensor_bytes: int
    object_bytes: int
    modules: int
    seconds: float


class _TooManyModules(BaseException):
    """Not an Exception, which a constructor might catch."""


@dataclass(frozen=True)
class _Weights:
    """Stored weights that a description belongs to: how many tensors, and how many bytes."""

    num_tensors: int
    num_bytes: int

    @classmethod
    def below(cls, folder: str) -> "_Weights":
        try:
            location = locate_weights(folder)
        except (CheckpointLoadError, OSError):
            # Another program's checkpoint, or a run without weights: its files only limit the size of the model.
            num_bytes = sum(_regular_sizes(folder))
            return cls(num_bytes // _BYTES_WITHOUT_INDEX, num_bytes)
        paths = {os.path.join(location.directory, file) for file in location.weight_map.values()}
        return cls(len(location.weight_map), sum(os.path.getsize(path) for path in paths if os.path.exists(path)))


def require_plausible_model(
    build: Callable[[], nn.Module], description: str, weights: str, values: object = None
) -> None:
    """Raise `CheckpointLoadError` if a described model cannot belong to stored weights; `build` builds it.

    `description` is the file with the description, `values` its content if it is no config.json, and `weights` the
    directory with the weights. A model that cannot be tried passes: its real construction shows why.
    """
    if values is None:
        values = _read_config(description)
    stored = _Weights.below(weights)
    is_quantised = isinstance(values, dict) and bool(values.get("quantization_config"))
    most_bytes = stored.num_bytes * (_MOST_GROWTH_QUANTISED if is_quantised else _MOST_GROWTH) + _BYTES
    seconds = _SECONDS + stored.num_tensors * _SECONDS_PER_TENSOR
    most_modules = stored.num_tensors * _MODULES_PER_TENSOR + _MODULES
    limits = _Limits(most_bytes, stored.num_tensors * _BYTES_PER_TENSOR, most_modules, seconds)
    verdict, reason = _tried(build, limits)
    if verdict in ("fits", "unknown"):
        return
    if verdict == "time":
        reason = f"building it takes more than {seconds:.0f} s"
    raise CheckpointLoadError(
        f"{description} describes a model that cannot belong to the weights in {weights}: "
        f"{reason or 'building it takes too much memory'}, and the weights are {stored.num_tensors:,} tensors of "
        f"{stored.num_bytes:,} bytes. The largest numbers are {_largest(values)}. Use the description that was stored with "
        "these weights."
    )


def _read_config(path: str) -> object:
    content = read_small_file(path, follow=True)
    try:
        values: object = strict_json.loads(content, path)
    except (ValueError, CheckpointLoadError):
        # The library that reads the file says what is wrong with it.
        return {}
    _import_architecture(values)
    return values


def _import_architecture(values: object) -> None:
    """Import the classes that a configuration names: the time and memory of the imports belong to no model."""
    import transformers
    from transformers import CONFIG_MAPPING

    names = values.get("architectures") if isinstance(values, dict) else None
    kind = values.get("model_type") if isinstance(values, dict) else None
    if isinstance(kind, str) and kind in CONFIG_MAPPING:
        _ = CONFIG_MAPPING[kind]
    if isinstance(names, list) and names and isinstance(names[0], str):
        getattr(transformers, names[0], None)


def _tried(build: Callable[[], nn.Module], limits: _Limits) -> tuple[_Verdict, str | None]:
    """Build the model in a forked process; returns the verdict, and the reason for a size that does not fit."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Newer versions of Python warn of forks of processes with threads. The child only builds modules.
        warnings.simplefilter("ignore", DeprecationWarning)
        process_id = os.fork()
    if process_id == 0:
        try:
            os.close(reader)
            # With the bytes of the tensors: some constructors ignore the meta device.
            _limit(limits.tensor_bytes + limits.object_bytes, limits.seconds)
            _limit_modules(limits.modules)
            found = _build_within(build, limits.tensor_bytes)
            os.write(writer, json.dumps(found).encode())
        finally:
            # Whatever happens, the child must neither return nor run the exit functions of its parent.
            os._exit(0)
    os.close(writer)
    try:
        answer, has_ended = _answer(reader, limits.seconds * _WAIT_FACTOR + _WAIT_SECONDS)
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGKILL)
        _, status = os.waitpid(process_id, 0)
    if answer:
        verdict, reason = json.loads(answer)
        return verdict, reason
    ended_by = -os.waitstatus_to_exitcode(status) if has_ended else 0
    verdicts: dict[int, _Verdict] = {
        signal.SIGPROF: "time",
        # Libraries in C++ abort when they get no memory. Only the kernel kills a process that has ended its answer.
        signal.SIGABRT: "memory",
        signal.SIGKILL: "memory",
    }
    return verdicts.get(ended_by, "unknown"), None


def _answer(reader: int, seconds: float) -> tuple[bytes, bool]:
    """Return what the child writes, and whether it has closed the pipe in time."""
    answer, deadline = b"", time.monotonic() + seconds
    while select.select([reader], [], [], max(deadline - time.monotonic(), 0))[0]:
        part = os.read(reader, 2**16)
        if not part:
            return answer, True
        answer += part
    return answer, False


def _limit(more_bytes: int, seconds: float) -> None:
    """Limit the processor time and the further memory of this process, and silence it."""
    silent = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(silent, descriptor)
    # Threads of OpenMP do not survive a fork.
    torch.set_num_threads(1)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    with contextlib.suppress(OSError, ValueError):
        # Not every system counts the pages, or enforces the limit.
        with open("/proc/self/statm", "rb") as file:
            in_use = int(file.read().split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = in_use + more_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _limit_modules(most: int) -> None:
    """Raise `_TooManyModules` when this process has built so many modules; it stays in force."""
    construct, count = nn.Module.__init__, itertools.count(1)

    def counted(self: nn.Module, *args: Any, **values: Any) -> None:
        if next(count) > most:
            raise _TooManyModules(f"it has more than {most:,} modules")
        construct(self, *args, **values)

    nn.Module.__init__ = counted  # type: ignore[method-assign]


def _build_within(build: Callable[[], nn.Module], most_bytes: int) -> tuple[_Verdict, str | None]:
    try:
        with no_init_weights(), torch.device("meta"):
            model = build()
            stored = {id(one) for one in model.state_dict(keep_vars=True).values()}
    except _TooManyModules as error:
        return "modules", str(error)
    except Exception as error:  # noqa: BLE001 - the code of many architectures
        return ("memory", None) if _is_too_large(error) else _build_with_memory(build)
    tensors = {id(one): (name, one) for name, one in _named_tensors(model)}
    total = sum(one.nbytes for _, one in tensors.values())
    of_buffers = sum(one.nbytes for key, (_, one) in tensors.items() if key not in stored)
    if total - min(of_buffers, _BYTES_OF_BUFFERS) <= most_bytes:
        return "fits", None
    name, largest = max(tensors.values(), key=lambda found: found[1].nbytes)
    return "memory", f"it has {total:,} bytes, and {name[:200]!r} alone has the shape {list(largest.shape)}"


def _build_with_memory(build: Callable[[], nn.Module]) -> tuple[_Verdict, str | None]:
    """Build a model whose constructor reads values, which the meta device does not have."""
    try:
        with no_init_weights():
            build()
    except _TooManyModules as error:
        return "modules", str(error)
    except Exception as error:  # noqa: BLE001 - as above
        return ("memory", None) if _is_too_large(error) else ("unknown", None)
    return "fits", None


def _is_too_large(error: Exception) -> bool:
    is_of_python = isinstance(error, (MemoryError, OverflowError))
    return is_of_python or any(part in str(error).lower() for part in _TOO_LARGE)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _regular_sizes(folder: str) -> Iterator[int]:
    for directory, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(directory, name)
            if os.path.isfile(path) and not os.path.islink(path):
                yield os.path.getsize(path)


def _largest(values: object) -> str:
    """Return the largest numbers of a description with their keys, for a message."""
    found = sorted(_numbers(values, ""), key=lambda one: one[1], reverse=True)[:_NUM_SHOWN]
    return ", ".join(f"{printable_line(key[:100])}={number}" for key, number in found) or "unknown"


def _numbers(value: Any, key: str) -> Iterator[tuple[str, int]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _numbers(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner, key)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield key, value
