"""FSDP2 and HSDP: fully sharded data parallelism with torch's fully_shard.

Names are imported on first use.
"""

from typing import TYPE_CHECKING

from forgather._lazy import lazily

if TYPE_CHECKING:
    from forgather.ml.trainer.fsdp2.fsdp2_arguments import FSDP2Arguments, FSDP2TrainingArguments
    from forgather.ml.trainer.fsdp2.fsdp2_trainer import FSDP2Trainer

__all__ = ["FSDP2Arguments", "FSDP2Trainer", "FSDP2TrainingArguments"]

__getattr__ = lazily(
    __name__,
    {
        "FSDP2Arguments": "fsdp2_arguments",
        "FSDP2Trainer": "fsdp2_trainer",
        "FSDP2TrainingArguments": "fsdp2_arguments",
    },
)
