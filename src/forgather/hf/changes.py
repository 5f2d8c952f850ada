"""Attributes and arguments that a script changes after construction: passed on to the engine, or refused.

Scripts train in stages with `trainer.train_dataset = ...` or `trainer.args.max_steps = ...`. `Trainer.train` calls
`pass_on`, and every evaluation calls `pass_on_to_evaluation`. Invariant: a changed value has an effect, or raises.
"""

import dataclasses
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

from forgather.hf.fields.engine_arguments import to_engine_arguments

if TYPE_CHECKING:
    from forgather.hf.trainer import Trainer

_READ_BY_EACH_EVALUATION = frozenset(
    {
        "batch_eval_metrics",
        "dataloader_drop_last",
        "dataloader_num_workers",
        "dataloader_persistent_workers",
        "dataloader_pin_memory",
        "dataloader_prefetch_factor",
        "eval_accumulation_steps",
        "include_for_metrics",
        "max_eval_steps",
        "per_device_eval_batch_size",
        "prediction_loss_only",
        "remove_unused_columns",
    }
)
# They would change the result of an evaluation, but have already shaped the model or its loss.
_FIXED_FOR_EVALUATIONS = frozenset({"label_names", "label_smoothing_factor", "mixed_precision", "use_cpu"})
# Read at each preparation. All other arguments have already shaped objects of the engine.
_READ_BY_EACH_RUN = _READ_BY_EACH_EVALUATION | frozenset(
    {
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
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
        "per_device_train_batch_size",
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
    now = _arguments_now(trainer)
    changed = _changed(trainer._engine_arguments, now)
    _refuse(changed.keys() - _READ_BY_EACH_RUN)
    for name, value in changed.items():
        setattr(engine.args, name, value)
    trainer._engine_arguments = now
    trainer._read_occasions()


def pass_on_to_evaluation(trainer: "Trainer") -> None:
    """Give the engine the collator and the arguments of evaluations that the facade has now."""
    engine = trainer.engine
    known, changed = trainer._engine_arguments, _changed(trainer._engine_arguments, _arguments_now(trainer))
    _refuse(changed.keys() & _FIXED_FOR_EVALUATIONS)
    applied = {name: value for name, value in changed.items() if name in _READ_BY_EACH_EVALUATION}
    if applied or engine.data_collator is not trainer.data_collator:
        # The loader of an earlier evaluation was built with the old values.
        engine.evaluator.dataset = None
    engine.data_collator = trainer.data_collator
    for name, value in applied.items():
        setattr(engine.args, name, value)
        setattr(known, name, value)


def _arguments_now(trainer: "Trainer") -> Any:
    return to_engine_arguments(trainer.args, type(trainer._engine_arguments), warns=False)


def _refuse(names: AbstractSet[str]) -> None:
    if names:
        raise ValueError(
            f"These arguments changed after the trainer was constructed, and cannot have an effect any more: "
            f"{', '.join(sorted(names))}. Set them before, or construct another Trainer."
        )


def _changed(before: Any, now: Any) -> dict[str, Any]:
    names = [one.name for one in dataclasses.fields(now)]
    return {name: getattr(now, name) for name in names if getattr(now, name) != getattr(before, name)}
