"""Data parallelism by torch's DistributedDataParallel."""

from forgather.ml.trainer.ddp.ddp_arguments import DDPArguments, DDPTrainingArguments, PostLocalSGDArguments
from forgather.ml.trainer.ddp.ddp_trainer import DDPTrainer

__all__ = ["DDPArguments", "DDPTrainer", "DDPTrainingArguments", "PostLocalSGDArguments"]
