"""Train and eval mode of a model, and activation checkpointing of Hugging Face models."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

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


def enable_hf_activation_checkpointing(
    rank: int, module: nn.Module, gradient_checkpointing_kwargs: Mapping[str, object] | None = None
) -> None:
    """Turn on activation checkpointing of a Hugging Face model; by default the variant that works with DDP and compile."""
    enable = getattr(module, "gradient_checkpointing_enable", None)
    if enable is None:
        raise ValueError(
            f"Activation checkpointing was asked for, but {type(module).__name__} (rank {rank}) has no method "
            "gradient_checkpointing_enable, which Hugging Face models have. Pass the trainer an "
            "enable_activation_checkpoint_fn that knows this model, or set gradient_checkpointing=False."
        )
    enable(gradient_checkpointing_kwargs={"use_reentrant": False, **(gradient_checkpointing_kwargs or {})})
