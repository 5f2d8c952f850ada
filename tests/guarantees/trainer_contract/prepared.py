"""Shared trainers for the tests of preparation hooks: two epochs of three steps."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forgather.ml.trainer.trainer import Trainer
from tests.support.data_parallel import Result, run
from tests.support.tiny_models import TokenModel, quiet_trainer, token_samples

SAMPLES = token_samples(12)
SETTINGS: dict[str, Any] = {
    "momentum": 0.9,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "logging_strategy": "steps",
    "logging_steps": 1,
}


def batches() -> list[dict[str, Tensor]]:
    pairs = zip(SAMPLES[::2], SAMPLES[1::2], strict=True)
    return [{name: torch.stack([one[name], two[name]]) for name in one} for one, two in pairs]


def build(output_dir: Path, trainer_class: Any = Trainer, **settings: Any) -> Any:
    return quiet_trainer(output_dir, TokenModel(), SAMPLES, trainer_class=trainer_class, **{**SETTINGS, **settings})


def train(output_dir: Path, trainer_class: Any, **settings: Any) -> tuple[Any, Result]:
    trainer = build(output_dir, trainer_class, num_train_epochs=2, **settings)
    return trainer, run(trainer)
