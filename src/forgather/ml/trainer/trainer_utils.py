"""What trainers do to models and devices besides training them."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


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


def enable_hf_activation_checkpointing(rank: int, module: nn.Module) -> None:
    """Turn on activation checkpointing of a Hugging Face model, in the variant that works with DDP and compilation."""
    enable = getattr(module, "gradient_checkpointing_enable", None)
    if enable is None:
        raise ValueError(
            f"Activation checkpointing was asked for, but {type(module).__name__} (rank {rank}) has no method "
            "gradient_checkpointing_enable, which Hugging Face models have. Pass the trainer an "
            "enable_activation_checkpoint_fn that knows this model, or set gradient_checkpointing=False."
        )
    enable(gradient_checkpointing_kwargs={"use_reentrant": False})
