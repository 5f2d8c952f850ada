"""Training arguments: dataclasses with defaults, checks and conversion from dicts."""

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
