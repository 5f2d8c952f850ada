"""Data parallel x pipeline parallel on a two-dimensional mesh."""

from forgather.ml.trainer.hybrid.hybrid_arguments import HybridTrainingArguments
from forgather.ml.trainer.hybrid.hybrid_trainer import HybridTrainer

__all__ = ["HybridTrainer", "HybridTrainingArguments"]
