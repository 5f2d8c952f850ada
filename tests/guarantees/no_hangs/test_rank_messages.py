"""Error messages for models that differ between ranks, and for unused parameters under DDP."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.data_parallel import ddp_trainer
from tests.support.ranks import outcomes_on_ranks
from tests.support.tiny_models import TokenModel, token_samples

DIFFERENCES: dict[str, str] = {
    "shape": "'head.weight': shape [32, 8], torch.float32 on rank 0, shape [40, 8], torch.float32 on rank 1",
    "name": "'spare.weight': missing on rank 0, shape [8, 8], torch.float32 on rank 1",
    "dtype": "'head.weight': shape [32, 8], torch.float32 on rank 0, shape [32, 8], torch.bfloat16 on rank 1",
    "frozen": "'head.weight': shape [32, 8], torch.float32 on rank 0, shape [32, 8], torch.float32, frozen on rank 1",
}


def train_different(kind: str, output_dir: str) -> None:
    model = TokenModel()
    if dist.get_rank() == 1:
        if kind == "shape":
            model.head = nn.Linear(8, 40, bias=False)
        if kind == "name":
            model.spare = nn.Linear(8, 8)
        if kind == "dtype":
            model.head.bfloat16()
        if kind == "frozen":
            model.head.requires_grad_(False)
    ddp_trainer(Path(output_dir), model, token_samples(4), max_steps=1).train()


@pytest.mark.parametrize("kind", DIFFERENCES)
def test_models_that_differ_between_ranks_are_rejected(tmp_path: Path, kind: str) -> None:
    for outcome in outcomes_on_ranks(train_different, 2, kind, str(tmp_path)):
        assert outcome.error_type == "ValueError", outcome
        assert DIFFERENCES[kind] in str(outcome.error_message) and "on every rank" in str(outcome.error_message)


class Spare(TokenModel):
    """Model that skips a layer: always, or after some forward passes."""

    def __init__(self, used: int) -> None:
        super().__init__()
        self.spare = nn.Linear(8, 8, bias=False)
        self.left = used

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        self.left -= 1
        logits: Tensor = self.head(self.spare(hidden) if self.left >= 0 else hidden)
        return logits


def train_spare(used: int, max_steps: int, ddp: dict[str, Any], output_dir: str) -> int:
    torch.manual_seed(0)
    trainer = ddp_trainer(Path(output_dir), Spare(used), token_samples(16), max_steps=max_steps, ddp=ddp)
    return trainer.train().global_step


@pytest.mark.parametrize(("used", "max_steps"), [(0, 1), (2, 6)], ids=["in the only step", "in a later step"])
def test_error_names_unused_parameters(tmp_path: Path, used: int, max_steps: int) -> None:
    outcomes = outcomes_on_ranks(train_spare, 2, used, max_steps, {}, str(tmp_path))
    assert all(outcome.failed for outcome in outcomes)
    told = [
        str(outcome.error_message)
        for outcome in outcomes
        if "the loss does not depend on them" in str(outcome.error_message)
    ]
    assert told and all("spare.weight" in one and "ddp.find_unused_parameters" in one for one in told)


def test_find_unused_parameters_allows_unused_parameters(tmp_path: Path) -> None:
    outcomes = outcomes_on_ranks(train_spare, 2, 0, 2, {"find_unused_parameters": True}, str(tmp_path))
    assert [outcome.value for outcome in outcomes] == [2, 2]


def train_spare_of_one_rank(output_dir: str) -> int:
    return train_spare(9 if dist.get_rank() == 0 else 0, 2, {}, output_dir)


def test_parameter_unused_on_one_rank_is_an_error_not_a_hang(tmp_path: Path) -> None:
    """The failing rank does not wait for the other rank, which waits for its gradients."""
    outcomes = outcomes_on_ranks(train_spare_of_one_rank, 2, str(tmp_path))
    assert all(outcome.failed for outcome in outcomes)
    assert "spare.weight" in str(outcomes[1].error_message)
