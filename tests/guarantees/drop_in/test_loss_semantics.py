"""Losses of subclasses: accumulation and ranks do not change the weights after training."""

import gc
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from forgather.hf import Trainer
from forgather.hf.engine.micro_step import MicroStep
from tests.guarantees.drop_in.programs import (
    LOSSES,
    Contrastive,
    IgnoringLoss,
    RankAwareLoss,
    SuperStep,
    UsingLoss,
    loss_function,
    made,
    trained,
    trained_on_ranks,
)
from tests.support.ranks import run_on_ranks

TOLERANCE = {"rtol": 0.0, "atol": 1e-6}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """Weights of the plain trainer on batches of eight."""
    return trained(Trainer, tmp_path_factory.mktemp("plain"), 8, 1)


@pytest.mark.parametrize("cls", LOSSES)
@pytest.mark.parametrize(("batch_size", "accumulation"), [(8, 1), (2, 4)])
def test_accumulation_does_not_change_the_weights(
    tmp_path: Path, expected: torch.Tensor, cls: type[Trainer], batch_size: int, accumulation: int
) -> None:
    torch.testing.assert_close(trained(cls, tmp_path, batch_size, accumulation), expected, **TOLERANCE)


class OwnModel(GPT2LMHeadModel):
    """Model with a name of its own, which tells transformers nothing about its loss."""


@pytest.mark.parametrize(("kind", "smoothing"), [(GPT2LMHeadModel, 0.0), (OwnModel, 0.1)])
def test_first_labels_of_a_model_without_loss_type_are_no_targets(
    tmp_path: Path, kind: type[GPT2LMHeadModel], smoothing: float
) -> None:
    def found(cls: type[Trainer], batch_size: int, accumulation: int) -> torch.Tensor:
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=1, eos_token_id=1
        )
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        model = kind(config)
        return trained(cls, tmp_path, batch_size, accumulation, model=model, label_smoothing_factor=smoothing)

    # The gradients of key biases are rounding errors, which Adam enlarges. Counting first labels changes weights by 1e-2.
    torch.testing.assert_close(found(InheritedLoss, 2, 4), found(Trainer, 8, 1), rtol=0.0, atol=1e-4)


class InheritedLoss(Trainer):
    """Override that calls the loss of the trainer."""

    def compute_loss(self, *values: Any, **keywords: Any) -> Any:
        return super().compute_loss(*values, **keywords)


@pytest.mark.parametrize("cls", [Trainer, *LOSSES])
def test_ranks_do_not_change_the_weights(tmp_path: Path, expected: torch.Tensor, cls: type[Trainer]) -> None:
    for of_rank in run_on_ranks(trained_on_ranks, 2, cls, str(tmp_path), 2, 2):
        torch.testing.assert_close(of_rank, expected, **TOLERANCE)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_compute_loss_func_gets_the_outputs_of_the_model(
    tmp_path: Path, expected: torch.Tensor, accumulation: int
) -> None:
    found = trained(Trainer, tmp_path, 8 // accumulation, accumulation, compute_loss_func=loss_function)
    torch.testing.assert_close(found, expected, **TOLERANCE)


def test_two_forward_passes_give_the_same_weights_on_ranks(tmp_path: Path) -> None:
    expected = trained(Contrastive, tmp_path / "one", 8, 1)
    for of_rank in run_on_ranks(trained_on_ranks, 2, Contrastive, str(tmp_path / "two"), 1, 4):
        torch.testing.assert_close(of_rank, expected, **TOLERANCE)


def test_reported_losses_are_weighted_by_targets(tmp_path: Path) -> None:
    plain = made(Trainer, tmp_path / "plain", per_device_train_batch_size=8).train()
    divided = made(IgnoringLoss, tmp_path / "divided", gradient_accumulation_steps=4).train()
    assert divided.training_loss == pytest.approx(plain.training_loss, abs=1e-6)
    assert divided.global_step == 2 and divided.metrics["train_loss"] == divided.training_loss


def evaluated(cls: type[Trainer], output_dir: str) -> float:
    return made(cls, output_dir).evaluate()["eval_loss"]


@pytest.mark.parametrize("cls", [UsingLoss, RankAwareLoss])
def test_ranks_do_not_change_the_loss_of_an_evaluation(tmp_path: Path, cls: type[Trainer]) -> None:
    expected = evaluated(Trainer, str(tmp_path / "one"))
    found = run_on_ranks(evaluated, 2, cls, str(tmp_path / "two"))
    assert found == pytest.approx([expected, expected], abs=1e-6)


def test_a_loss_set_on_the_instance_is_used_in_every_step(tmp_path: Path) -> None:
    trainer, num_calls = made(SuperStep, tmp_path, max_steps=3), 0

    def compute_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        nonlocal num_calls
        num_calls += 1
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss

    vars(trainer)["compute_loss"] = types.MethodType(compute_loss, trainer)
    trainer.train()
    assert num_calls == 3


def test_no_micro_batch_is_kept_in_memory(tmp_path: Path) -> None:
    class Both(IgnoringLoss, SuperStep):
        """Overrides of both methods: the first is wrapped for each micro-batch."""

    made(Both, tmp_path, max_steps=4).train()
    gc.collect()
    assert [one for one in gc.get_objects() if type(one) is MicroStep] == []
