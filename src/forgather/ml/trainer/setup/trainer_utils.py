"""What trainers do to models and devices besides training them."""

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from forgather.ml.distributed.environment import DistributedEnvInterface
from forgather.ml.trainer.loading.empty_batch import EmptyBatch


@contextmanager
def set_train(model: nn.Module, mode: bool) -> Iterator[None]:
    """Put the model in train or eval mode, and give every submodule its own mode back afterwards.

    Users freeze parts of a model with `eval()`; setting one mode for all on the way out would thaw them.
    """
    previous = [(module, module.training) for module in model.modules()]
    model.train(mode)
    try:
        yield
    finally:
        for module, training in previous:
            module.training = training


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


def moved(value: Any, device: torch.device) -> Any:
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


def enable_hf_activation_checkpointing(
    rank: int, module: nn.Module, gradient_checkpointing_kwargs: Mapping[str, Any] | None = None
) -> None:
    """Turn on activation checkpointing of a Hugging Face model, in the variant that works with DDP and compilation.

    `gradient_checkpointing_kwargs` go to torch's `checkpoint`; without a word of theirs, `use_reentrant` is False.
    """
    enable = getattr(module, "gradient_checkpointing_enable", None)
    if enable is None:
        raise ValueError(
            f"Activation checkpointing was asked for, but {type(module).__name__} (rank {rank}) has no method "
            "gradient_checkpointing_enable, which Hugging Face models have. Pass the trainer an "
            "enable_activation_checkpoint_fn that knows this model, or set gradient_checkpointing=False."
        )
    enable(gradient_checkpointing_kwargs={"use_reentrant": False, **(gradient_checkpointing_kwargs or {})})
