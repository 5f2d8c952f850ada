"""Train and eval modes of a model, and activation checkpointing of Hugging Face models.

`set_train` restores the mode of each submodule. Training, evaluation and loss resolution use it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn


@contextmanager
def set_train(model: nn.Module, mode: bool) -> Iterator[None]:
    """Set the model to train or eval mode, and restore the mode of every submodule afterwards."""
    # Users freeze submodules with `eval()`. A single mode for all modules on exit would unfreeze them.
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
    """Enable activation checkpointing of a Hugging Face model; `use_reentrant` defaults to False."""
    enable = getattr(module, "gradient_checkpointing_enable", None)
    if enable is None:
        raise ValueError(
            f"Activation checkpointing cannot be enabled: {type(module).__name__} (rank {rank}) has no method "
            "gradient_checkpointing_enable, as Hugging Face models have. Pass an enable_activation_checkpoint_fn for this "
            "model to the trainer, or set gradient_checkpointing=False."
        )
    # The non-reentrant variant works with DDP and torch.compile.
    enable(gradient_checkpointing_kwargs={"use_reentrant": False, **(gradient_checkpointing_kwargs or {})})
