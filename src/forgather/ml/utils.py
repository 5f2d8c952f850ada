"""Small things about models: their default dtype, their size, what a token costs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn


@contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Make floating tensors of this dtype by default; None changes nothing."""
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
    """How many numbers a model learns; tied parameters count once."""

    total: int
    trainable: int
    embedding: int
    """Those of embedding tables, and of an output layer that is tied to one."""
    non_embedding: int


def count_parameters(model: nn.Module) -> ModelParameterStats:
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
    """What training on one token takes: a multiply and an add per weight forward, and twice that backward."""
    return 6 * stats.non_embedding


class ModelWrapper(nn.Module):
    """A module that runs another one, `wrapped`, without owning parameters; `unwrap_model` takes it off."""

    wrapped: nn.Module


def unwrap_model(model: nn.Module) -> nn.Module:
    """The model inside DDP, torch.compile and wrappers of ours: the one with the FQNs that checkpoints hold."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(model, ModelWrapper):
            model = model.wrapped
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def without_ddp(model: nn.Module) -> nn.Module:
    """The module that DDP wraps, compiled or not; another module as it is."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
