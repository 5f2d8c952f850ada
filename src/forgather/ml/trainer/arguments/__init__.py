"""Training arguments: dataclasses with defaults, type conversion and validation.

The classes are shared by all trainers and by the command line.
"""

from forgather.ml.trainer.arguments.training_arguments import (
    ArgumentGroup,
    BaseTrainingArguments,
    MinimalTrainingArguments,
    TrainingArguments,
    arguments_from,
    refuse_short_weights,
)

__all__ = [
    "ArgumentGroup",
    "BaseTrainingArguments",
    "MinimalTrainingArguments",
    "TrainingArguments",
    "arguments_from",
    "refuse_short_weights",
]
