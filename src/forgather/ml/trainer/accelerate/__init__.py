"""Data parallelism through Hugging Face Accelerate."""

from forgather.ml.trainer.accelerate.accel_trainer import AccelTrainer, AccelTrainingArguments

__all__ = ["AccelTrainer", "AccelTrainingArguments"]
