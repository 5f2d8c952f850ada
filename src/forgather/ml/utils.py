"""Model utilities: default dtype, parameter counts, FLOPs per token, and unwrapping of DDP and torch.compile.

Used by the trainers, the callbacks and `finalize`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn


@contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Set torch's default floating-point dtype inside the context; None changes nothing."""
    if dtype is None:
        yield
        return
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


@dataclass(frozen=True)
class ModelParameterStats:
    """Number of parameters of a model; tied parameters count once."""

    total: int
    trainable: int
    embedding: int
    """Parameters of embedding tables, including an output layer that is tied to one."""
    non_embedding: int


def count_parameters(model: nn.Module) -> ModelParameterStats:
    # `parameters()` yields tied parameters once.
    parameters = list(model.parameters())
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    in_tables = {parameter for table in tables for parameter in table.parameters()}
    total = sum(parameter.numel() for parameter in parameters)
    embedding = sum(parameter.numel() for parameter in in_tables)
    return ModelParameterStats(
        total=total,
        trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        embedding=embedding,
        non_embedding=total - embedding,
    )


def flops_per_token(stats: ModelParameterStats) -> int:
    """Return the training FLOPs per token: 2 per weight in the forward pass and 4 in the backward pass."""
    # Embedding tables are looked up, not multiplied. Attention scores are not counted either.
    return 6 * stats.non_embedding


class ModelWrapper(nn.Module):
    """Module that runs another module, `wrapped`, without owning parameters; `unwrap_model` removes it."""

    wrapped: nn.Module


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the model inside DDP, torch.compile and `ModelWrapper`: its FQNs are the names in checkpoints."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(model, ModelWrapper):
            model = model.wrapped
        # torch.compile keeps the original module in this attribute.
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def class_of(model: nn.Module) -> type[nn.Module]:
    """Return the class of a model. For a sharded model, it is the class before fully_shard replaced it."""
    # A model `Llama` has the class `FSDPLlama(FSDPModule, Llama)` then, which only this process knows.
    bases = type(model).__bases__
    is_sharded = len(bases) == 2 and bases[0].__name__ == "FSDPModule"
    return bases[1] if is_sharded else type(model)


def without_ddp(model: nn.Module) -> nn.Module:
    """Return the module that DDP wraps, compiled or not; return any other module unchanged."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
