"""Default dtype, and the parameter counts of models."""

import pytest
import torch
from torch import nn

from forgather.ml.utils import ModelParameterStats, count_parameters, default_dtype, flops_per_token


class LanguageModel(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 10, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def test_default_dtype_is_restored_even_after_an_error() -> None:
    with pytest.raises(KeyError), default_dtype(torch.bfloat16):
        assert torch.ones(1).dtype == torch.bfloat16
        raise KeyError
    assert torch.get_default_dtype() == torch.float32


def test_no_dtype_changes_nothing() -> None:
    with default_dtype(None):
        assert torch.get_default_dtype() == torch.float32


def test_embeddings_are_counted_separately() -> None:
    assert count_parameters(LanguageModel(tied=False)) == ModelParameterStats(
        total=100, trainable=100, embedding=40, non_embedding=60
    )


def test_tied_head_counts_once_as_embedding() -> None:
    assert count_parameters(LanguageModel(tied=True)) == ModelParameterStats(
        total=60, trainable=60, embedding=40, non_embedding=20
    )


def test_frozen_parameters_are_not_trainable() -> None:
    model = LanguageModel(tied=True)
    model.body.requires_grad_(False)
    assert count_parameters(model).trainable == 40


def test_flops_per_token_are_six_per_weight() -> None:
    assert flops_per_token(count_parameters(LanguageModel(tied=True))) == 120
