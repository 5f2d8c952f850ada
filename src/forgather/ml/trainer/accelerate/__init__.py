"""Data parallelism with Hugging Face Accelerate: trainer and arguments.

Names are imported on first use.
"""

from typing import TYPE_CHECKING

from forgather._lazy import lazily

if TYPE_CHECKING:
    from forgather.ml.trainer.accelerate.accel_trainer import AccelTrainer, AccelTrainingArguments

__all__ = ["AccelTrainer", "AccelTrainingArguments"]

__getattr__ = lazily(
    __name__,
    {
        "AccelTrainer": "accel_trainer",
        "AccelTrainingArguments": "accel_trainer",
    },
)
