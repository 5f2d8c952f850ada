"""Constructors of trainers: explicit signatures, with every parameter documented."""

import inspect

import pytest

from forgather.ml.trainer.ddp.ddp_trainer import DDPTrainer
from forgather.ml.trainer.pipeline.pipeline_trainer import PipelineTrainer
from forgather.ml.trainer.trainer import Trainer


@pytest.mark.parametrize("trainer_class", [Trainer, DDPTrainer, PipelineTrainer])
def test_every_parameter_is_explicit_and_documented(trainer_class: type) -> None:
    parameters = inspect.signature(trainer_class).parameters
    assert {"args", "model", "train_dataset", "optimizer_factory", "callbacks", "loss_fn"} <= parameters.keys()
    assert all(one.kind is not one.VAR_KEYWORD for one in parameters.values())
    documentation = inspect.getdoc(trainer_class) or ""
    assert [name for name in parameters if f"    {name}: " not in documentation] == []
