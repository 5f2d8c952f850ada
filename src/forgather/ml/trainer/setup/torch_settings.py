"""Torch settings during a run: SDPA backends and the activation memory budget of torch.compile.

The context managers restore the previous settings. `Trainer` enters them around training and evaluation.
"""

import contextlib
from collections.abc import Iterator

import torch

from forgather.ml.trainer.arguments.training_arguments import TrainingArguments

_MODES_WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")


@contextlib.contextmanager
def torch_settings(args: TrainingArguments) -> Iterator[None]:
    """Select the SDPA backends of the arguments for the body."""
    if args.sdpa_backend is None:
        yield
        return
    with _attention_by(args.sdpa_backend, args.sdpa_set_priority):
        yield


@contextlib.contextmanager
def activation_budget(budget: float | None) -> Iterator[None]:
    """Set the activation memory budget of torch.compile for the body; None keeps torch's default."""
    if budget is None:
        yield
        return
    from torch._functorch import config

    # Graphs are cached per class of model, without the budget in the key. Reset, so that no graph compiled for another
    # budget is reused, here or afterwards.
    torch.compiler.reset()
    try:
        # The budget is read when a graph is compiled, at its first use, so the patch covers the full run.
        with config.patch(activation_memory_budget=budget):
            yield
    finally:
        torch.compiler.reset()


def cuda_graphs_problem(
    mode: str | None, device_type: str, num_batches: int, is_pipeline: bool, by_layer: bool = False
) -> str | None:
    """Return why a compile mode with CUDA graphs cannot be used, or None if it can or uses no CUDA graphs."""
    if device_type != "cuda" or mode not in _MODES_WITH_CUDA_GRAPHS:
        return None
    if by_layer:
        return "torch_compile_scope='layer' runs one graph for several layers of a pass, but a graph has memory for only one"
    if is_pipeline:
        return "a pipeline holds the activations of several micro-batches at once, but a graph has memory for only one"
    if num_batches > 1:
        return (
            f"gradient_accumulation_steps={num_batches} accumulates gradients over several passes, but each pass of a graph "
            "overwrites them"
        )
    return None


def _attention_by(names: str | list[str], set_priority: bool) -> contextlib.AbstractContextManager[object]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = {
        "math": SDPBackend.MATH,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
    }
    chosen = [names] if isinstance(names, str) else names
    return sdpa_kernel([backends[name] for name in chosen], set_priority=set_priority)
