"""Settings of torch that hold while a trainer runs, and are given back afterwards."""

import contextlib
from collections.abc import Iterator
from typing import Any

from forgather.ml.trainer.arguments import TrainingArguments


@contextlib.contextmanager
def torch_settings(args: TrainingArguments) -> Iterator[None]:
    """What computes attention, and how much the compiler lets the backward pass recompute."""
    with contextlib.ExitStack() as settings:
        if args.sdpa_backend is not None:
            settings.enter_context(_attention_by(args.sdpa_backend, args.sdpa_set_priority))
        if getattr(args, "activation_memory_budget", None) is not None:
            # Read when a graph is compiled, which is at its first use.
            from torch._functorch import config

            settings.enter_context(config.patch(activation_memory_budget=args.activation_memory_budget))
        yield


def _attention_by(names: str | list[str], set_priority: bool) -> Any:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = {
        "math": SDPBackend.MATH,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
    }
    chosen = [names] if isinstance(names, str) else names
    return sdpa_kernel([backends[name] for name in chosen], set_priority=set_priority)
