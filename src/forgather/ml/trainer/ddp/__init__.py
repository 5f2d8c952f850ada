"""Data parallelism with torch's DistributedDataParallel (DDP): trainer and arguments.

Names are imported on first use.
"""

from typing import TYPE_CHECKING

from forgather._lazy import lazily

if TYPE_CHECKING:
    from forgather.ml.trainer.ddp.ddp_arguments import DDPArguments, DDPTrainingArguments, PostLocalSGDArguments
    from forgather.ml.trainer.ddp.ddp_trainer import DDPTrainer

__all__ = ["DDPArguments", "DDPTrainer", "DDPTrainingArguments", "PostLocalSGDArguments"]

__getattr__ = lazily(
    __name__,
    {
        "DDPArguments": "ddp_arguments",
        "DDPTrainer": "ddp_trainer",
        "DDPTrainingArguments": "ddp_arguments",
        "PostLocalSGDArguments": "ddp_arguments",
    },
)
