"""Attributes and arguments that a script changes after construction: passed on to the engine, or refused.

Scripts train in stages with `trainer.train_dataset = ...` or `trainer.args.max_steps = ...`. `Trainer.train` calls
`pass_on`. Invariant: a changed value has an effect, or raises.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

from forgather.hf.fields.conversions import fractions
from forgather.hf.fields.engine_arguments import to_engine_arguments

if TYPE_CHECKING:
    from forgather.hf.trainer import Trainer

# Read at each preparation. All other arguments have already shaped objects of the engine.
_READ_BY_EACH_RUN = frozenset(
    {
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "dataloader_drop_last",
        "dataloader_num_workers",
        "dataloader_persistent_workers",
        "dataloader_pin_memory",
        "dataloader_prefetch_factor",
        "eval_accumulation_steps",
        "eval_delay",
        "eval_on_start",
        "eval_steps",
        "eval_strategy",
        "gradient_accumulation_steps",
        "learning_rate",
        "logging_first_step",
        "logging_steps",
        "logging_strategy",
        "lr_scheduler_kwargs",
        "lr_scheduler_type",
        "max_grad_norm",
        "max_steps",
        "num_train_epochs",
        "per_device_eval_batch_size",
        "per_device_train_batch_size",
        "prediction_loss_only",
        "save_steps",
        "save_strategy",
        "save_total_limit",
        "seed",
        "warmup_steps",
        "weight_decay",
    }
)


def pass_on(trainer: "Trainer") -> None:
    """Give the engine the data, the collator and the arguments that the facade has now."""
    engine = trainer.engine
    engine.train_dataset, engine.eval_dataset = trainer.train_dataset, trainer.eval_dataset
    engine.data_collator, engine.processing_class = trainer.data_collator, trainer.processing_class
    now = to_engine_arguments(trainer.args, type(trainer._engine_arguments), warns=False)
    changed = _changed(trainer._engine_arguments, now)
    refused = sorted(changed.keys() - _READ_BY_EACH_RUN)
    if refused:
        raise ValueError(
            f"These arguments changed after the trainer was constructed, and cannot have an effect any more: "
            f"{', '.join(refused)}. Set them before, or construct another Trainer."
        )
    for name, value in changed.items():
        setattr(engine.args, name, value)
    trainer._engine_arguments, trainer._fractions = now, fractions(trainer.args)


def _changed(before: Any, now: Any) -> dict[str, Any]:
    names = [one.name for one in dataclasses.fields(now)]
    return {name: getattr(now, name) for name in names if getattr(now, name) != getattr(before, name)}
