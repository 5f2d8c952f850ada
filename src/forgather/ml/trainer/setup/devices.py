"""Devices: selection for a process, transfer of batches, and the cache of the accelerator's allocator.

The processes of a node use different devices. `Trainer` and its set-up call these functions.
"""

import gc
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from forgather.ml.distributed.devices import device_index
from forgather.ml.distributed.environment import DistributedEnvInterface
from forgather.ml.trainer.arguments.training_arguments import MinimalTrainingArguments
from forgather.ml.trainer.loading.copy_streams import can_pin, copy_stream, tracks_streams
from forgather.ml.trainer.loading.empty_batch import EmptyBatch


def require_device(asked: str | torch.device | None) -> None:
    """Raise ValueError for a device that this process does not have."""
    device = _device_of(asked)
    if device.type not in ("cuda", "mps", "xpu"):
        return
    module = torch.get_device_module(device.type)
    number = module.device_count() if module.is_available() else 0
    if number == 0:
        raise ValueError(
            f"device={str(asked)!r} cannot be used: torch {torch.__version__} finds no {device.type} device "
            f"({_no_device(device)}). Leave device unset to use an accelerator if available and else the CPU, or set "
            "use_cpu=True."
        )
    if device.index is not None and device.index >= number:
        raise ValueError(
            f"device={str(asked)!r} cannot be used: torch finds {number} {device.type} device(s), numbered from 0 to "
            f"{number - 1}. Choose one of them, or set {device.type!r} without a number."
        )


def _device_of(asked: str | torch.device | None) -> torch.device:
    try:
        return torch.device("cpu" if asked is None else asked)
    except RuntimeError:
        raise ValueError(
            f"device={asked!r} is no device of torch. Give a type with or without a number, such as 'cpu', 'cuda' or 'cuda:1'."
        ) from None


def _no_device(device: torch.device) -> str:
    if device.type != "cuda":
        return "the machine has none, or this torch was built without support for it"
    if torch.version.cuda is None and torch.version.hip is None:
        return "this torch was built without CUDA; see https://pytorch.org/get-started for a build with CUDA"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = "" if visible is None else f", and CUDA_VISIBLE_DEVICES={visible!r} hides all other devices"
    return f"the machine has none, or its driver does not work: see nvidia-smi{shown}"


def choose_device(asked: str | torch.device | None, kind: str, env: DistributedEnvInterface) -> torch.device:
    """Return the device of a process: the requested index, or else the device of its environment."""
    if kind == "cpu":
        return torch.device(kind)
    # The environment binds its communication backend to its device, so with several local ranks it takes precedence.
    is_of_env = env.device_type == kind and torch.device(env.device).index is not None
    own = torch.device(env.device) if is_of_env else torch.device(kind, device_index(env.local_rank))
    if asked is None or torch.device(asked).index is None:
        return own
    if is_of_env and env.local_world_size > 1 and torch.device(asked) != own:
        raise ValueError(
            f"device={str(asked)!r} cannot be used by local rank {env.local_rank}: its device is {own}. The "
            f"{env.local_world_size} processes of a node communicate through different devices. Leave device unset, set "
            f"{kind!r}, or pass a DistributedEnvironment(device_map=...)."
        )
    return torch.device(asked)


def moved(value: object, device: torch.device) -> Any:
    """Move a batch to the device, with tensors nested in dicts, lists and tuples.

    Copies run on a stream beside the compute stream. Between logs the host is ahead of the device, so a batch arrives
    while the device still computes the step before.
    """
    if device.type == "cpu":
        return value
    if not can_pin(device) or not tracks_streams(device):
        return _changed(value, lambda tensor: tensor.to(device, non_blocking=True))
    stream, compute = copy_stream(device, "batches"), torch.accelerator.current_stream(device)

    def copied(tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu":
            return tensor.to(device, non_blocking=True)
        # Asynchronous only from pinned memory (dataloader_pin_memory).
        with stream:
            result = tensor.to(device, non_blocking=True)
        # The memory belongs to the copy stream, which must not reuse it before the compute stream is done with it.
        result.record_stream(compute)
        return result

    result = _changed(value, copied)
    compute.wait_stream(stream)
    return result


def _changed(value: object, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a batch with all tensors changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        # Keep the type EmptyBatch: it marks a placeholder without targets.
        parts = {name: _changed(part, change) for name, part in value.items()}
        return EmptyBatch(parts) if isinstance(value, EmptyBatch) else parts
    if isinstance(value, (list, tuple)):
        items = [_changed(part, change) for part in value]
        # A namedtuple takes its items as separate arguments.
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def maybe_cleanup_memory(threshold: float) -> None:
    """Empty the allocator cache if more than this fraction of device memory is reserved but unused; no-op on CPU."""
    # Emptying the cache costs a synchronisation and new allocations, so it is not worth it for small amounts.
    if not torch.accelerator.is_available():
        return
    unused = torch.accelerator.memory_reserved() - torch.accelerator.memory_allocated()
    # Test `unused` first: backends without a cache report 0, and may not implement `get_memory_info`.
    if unused > 0 and unused / torch.accelerator.get_memory_info()[1] > threshold:
        # Collect reference cycles first: their tensors would keep blocks of the cache in use.
        gc.collect()
        torch.accelerator.empty_cache()


def device_type(args: MinimalTrainingArguments) -> str:
    """Return the type of device that a trainer with these arguments uses."""
    if args.use_cpu:
        return "cpu"
    if args.device is not None:
        return torch.device(args.device).type
    return str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else "cpu"
