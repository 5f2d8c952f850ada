"""Each recipe on the rehearsal device: training, save and exact resume, without host waits between logs."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from forgather.ml.loss import LinearCrossEntropyLoss
from forgather.ml.trainer.trainer import Trainer
from tests.rehearsal.test_trainers import assert_no_waits, assert_sound, build
from tests.support.rehearsal.jobs import NUM_STEPS, train_save_and_resume
from tests.support.tiny_models import tiny_llama, weights

ADAMW = {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 1e-2, "fused": True})}
FUSED_LOSS = {"fused_loss_factory": LinearCrossEntropyLoss}

# The recipes float8 and compilation need kernels that the rehearsal device does not have.
RECIPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fused loss": (FUSED_LOSS, {}),
    "fused loss and checkpointing": (FUSED_LOSS, {"gradient_checkpointing": True}),
    "full checkpointing": ({}, {"gradient_checkpointing": "full"}),
    "selective checkpointing": ({}, {"gradient_checkpointing": "selective"}),
    "activation offloading": ({}, {"enable_activation_offloading": True}),
    "EMA": ({}, {"ema_decay": 0.9, "eval_ema": True}),
    "step in backward": ({}, {"fuse_optim_with_backward": True, "max_grad_norm": None}),
    "QAT int8": ({}, {"qat_recipe": "int8-dynamic-act-int4-weight"}),
    "QAT int4": ({}, {"qat_recipe": "int4-weight-only"}),
    "master weights": (ADAMW, {"param_precision": "bf16_master"}),
    "stochastic rounding": (ADAMW, {"param_precision": "bf16_stochastic"}),
    "skipped updates": (ADAMW, {"nonfinite_grad": "skip"}),
}


def aligned_llama() -> nn.Module:
    """Return a Llama with dimensions that are multiples of the group size 32 of QAT, with dropout."""
    return tiny_llama(hidden_size=32, intermediate_size=64, attention_dropout=0.1)


def end_of(trainer: Trainer[Any]) -> dict[str, Any]:
    loss = trainer.evaluate()["eval_loss"]
    return {**weights(trainer.unwrapped_model()), "eval_loss": torch.tensor(loss)}


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_trains_and_resumes_exactly_without_waits(tmp_path: Path, recipe: str) -> None:
    options, settings = RECIPES[recipe]
    job = functools.partial(build, Trainer, {"model_init": aligned_llama, **options}, settings)
    report = train_save_and_resume(job, tmp_path / "parts", end_of)
    assert_sound(report)
    assert_no_waits(report)
    whole = job(tmp_path / "whole", use_cpu=False, max_steps=NUM_STEPS)
    whole.train()
    for name, expected in end_of(whole).items():
        assert torch.equal(report.result[name], expected), name
