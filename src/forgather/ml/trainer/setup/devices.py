"""Devices: choosing one for a process, moving batches to it, emptying its cache."""

import gc
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from forgather.ml.distributed.environment import DistributedEnvInterface
from forgather.ml.trainer.arguments.training_arguments import MinimalTrainingArguments
from forgather.ml.trainer.loading.empty_batch import EmptyBatch


def require_device(asked: str | torch.device | None) -> None:
    """Raise `ValueError` for a device that this process does not have."""
    device = torch.device("cpu" if asked is None else asked)
    if device.type not in ("cuda", "mps", "xpu"):
        return
    module = torch.get_device_module(device.type)
    number = module.device_count() if module.is_available() else 0
    if number == 0:
        raise ValueError(
            f"device={str(asked)!r} cannot be used: torch {torch.__version__} finds no {device.type} device "
            f"({_no_device(device)}). Leave device unset, which takes an accelerator if there is one and else the CPU, or "
            "set use_cpu=True."
        )
    if device.index is not None and device.index >= number:
        raise ValueError(
            f"device={str(asked)!r} cannot be used: torch finds {number} {device.type} device(s), numbered from 0 to "
            f"{number - 1}. Choose one of them, or say {device.type!r} alone."
        )


def _no_device(device: torch.device) -> str:
    if device.type != "cuda":
        return "the machine has none, or this torch was built without support for it"
    if torch.version.cuda is None and torch.version.hip is None:
        return "this torch was built without CUDA; https://pytorch.org/get-started says how to install one with it"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = "" if visible is None else f", and CUDA_VISIBLE_DEVICES={visible!r} hides those that it does not name"
    return f"the machine has none, or its driver does not work: see nvidia-smi{shown}"


def choose_device(asked: str | torch.device | None, kind: str, env: DistributedEnvInterface) -> torch.device:
    """The device of this kind that a process uses: the one with the number asked for, else that of its environment."""
    if kind == "cpu":
        return torch.device(kind)
    is_of_env = env.device_type == kind and torch.device(env.device).index is not None
    own = torch.device(env.device) if is_of_env else torch.device(kind, env.local_rank)
    if asked is None or torch.device(asked).index is None:
        return own
    if is_of_env and env.local_world_size > 1 and torch.device(asked) != own:
        raise ValueError(
            f"device={str(asked)!r} cannot be used by local rank {env.local_rank}, whose device is {own}: the "
            f"{env.local_world_size} processes of a node use different ones, and messages between them go by these. Leave "
            f"device unset, say {kind!r}, or give a DistributedEnvironment(device_map=...)."
        )
    return torch.device(asked)


def moved(value: object, device: torch.device) -> Any:
    """A batch, or a part of one, on the device, however deep in dicts, lists and tuples its tensors are."""
    if device.type == "cpu":
        return value
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        parts = {name: moved(part, device) for name, part in value.items()}
        return EmptyBatch(parts) if isinstance(value, EmptyBatch) else parts
    if isinstance(value, (list, tuple)):
        items = [moved(part, device) for part in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def maybe_cleanup_memory(threshold: float) -> None:
    """Empty the accelerator's cache when more than this share of its memory is reserved but unused.

    Emptying it costs a synchronisation and new allocations, which small amounts do not repay. Nothing happens on CPU.
    """
    if not torch.accelerator.is_available():
        return
    unused = torch.accelerator.memory_reserved() - torch.accelerator.memory_allocated()
    # Backends without such a cache report nothing unused, and may not know their total either.
    if unused > 0 and unused / torch.accelerator.get_memory_info()[1] > threshold:
        # First the reference cycles: the tensors they hold would keep their blocks in the cache.
        gc.collect()
        torch.accelerator.empty_cache()


def device_type(args: MinimalTrainingArguments) -> str:
    """The kind of device that a trainer with these arguments will use."""
    if args.use_cpu:
        return "cpu"
    if args.device is not None:
        return torch.device(args.device).type
    return str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else "cpu"
