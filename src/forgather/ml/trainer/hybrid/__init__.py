"""Hybrid parallelism: data parallel x pipeline parallel on a two-dimensional device mesh.

Names are imported on first use.
"""

from typing import TYPE_CHECKING

from forgather._lazy import lazily

if TYPE_CHECKING:
    from forgather.ml.trainer.hybrid.hybrid_arguments import HybridTrainingArguments
    from forgather.ml.trainer.hybrid.hybrid_trainer import HybridTrainer

__all__ = ["HybridTrainer", "HybridTrainingArguments"]

__getattr__ = lazily(
    __name__,
    {
        "HybridTrainer": "hybrid_trainer",
        "HybridTrainingArguments": "hybrid_arguments",
    },
)
