"""Trainers, and the checkpoint coordinator and manager that they use.

The names below are imported lazily, on first use, so that a program does not import the strategies it does not use.
"""

from typing import TYPE_CHECKING

from forgather._lazy import lazily, listing

if TYPE_CHECKING:
    from forgather.ml.checkpoint.components import SharingPattern, StateComponent
    from forgather.ml.trainer.accelerate.accel_trainer import AccelTrainer, AccelTrainingArguments
    from forgather.ml.trainer.base_trainer import BaseTrainer, BaseTrainingArguments
    from forgather.ml.trainer.ddp.ddp_trainer import DDPTrainer, DDPTrainingArguments
    from forgather.ml.trainer.fsdp2.fsdp2_trainer import FSDP2Trainer, FSDP2TrainingArguments
    from forgather.ml.trainer.hybrid.hybrid_trainer import HybridTrainer, HybridTrainingArguments
    from forgather.ml.trainer.loop.nonfinite import NonFiniteError
    from forgather.ml.trainer.pipeline.pipeline_trainer import PipelineTrainer, PipelineTrainingArguments
    from forgather.ml.trainer.trainer import MinimalTrainingArguments, Trainer, TrainerState, TrainingArguments
    from forgather.ml.trainer.trainer_types import (
        IntervalStrategy,
        TrainerCallback,
        TrainerControl,
        TrainOutput,
    )

_HOMES = {
    "DataloaderDispatcher": "dataloader_dispatcher",
    "ComponentManifest": "checkpoint_types",
    "CheckpointManifest": "checkpoint_types",
    "CheckpointConfig": "checkpoint_manager",
    "CheckpointManager": "checkpoint_manager",
    "CheckpointCoordinator": "checkpoint_coordinator",
    "AccelTrainer": "accelerate.accel_trainer",
    "AccelTrainingArguments": "accelerate.accel_trainer",
    "BaseTrainer": "base_trainer",
    "BaseTrainingArguments": "base_trainer",
    "DDPTrainer": "ddp.ddp_trainer",
    "DDPTrainingArguments": "ddp.ddp_trainer",
    "FSDP2Trainer": "fsdp2.fsdp2_trainer",
    "FSDP2TrainingArguments": "fsdp2.fsdp2_arguments",
    "HybridTrainer": "hybrid.hybrid_trainer",
    "HybridTrainingArguments": "hybrid.hybrid_trainer",
    "IntervalStrategy": "trainer_types",
    "MinimalTrainingArguments": "trainer",
    "NonFiniteError": "loop.nonfinite",
    "PipelineTrainer": "pipeline.pipeline_trainer",
    "PipelineTrainingArguments": "pipeline.pipeline_trainer",
    "SharingPattern": "checkpoint_types",
    "StateComponent": "checkpoint_types",
    "TrainOutput": "trainer_types",
    "Trainer": "trainer",
    "TrainerCallback": "trainer_types",
    "TrainerControl": "trainer_types",
    "TrainerState": "trainer",
    "TrainingArguments": "trainer",
}

__all__ = [
    "AccelTrainer",
    "AccelTrainingArguments",
    "BaseTrainer",
    "BaseTrainingArguments",
    "CheckpointConfig",
    "CheckpointCoordinator",
    "CheckpointManager",
    "CheckpointManifest",
    "ComponentManifest",
    "DDPTrainer",
    "DDPTrainingArguments",
    "DataloaderDispatcher",
    "FSDP2Trainer",
    "FSDP2TrainingArguments",
    "HybridTrainer",
    "HybridTrainingArguments",
    "IntervalStrategy",
    "MinimalTrainingArguments",
    "NonFiniteError",
    "PipelineTrainer",
    "PipelineTrainingArguments",
    "SharingPattern",
    "StateComponent",
    "TrainOutput",
    "Trainer",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
    "TrainingArguments",
]


__getattr__ = lazily(__name__, _HOMES)
__dir__ = listing(__name__, _HOMES)
