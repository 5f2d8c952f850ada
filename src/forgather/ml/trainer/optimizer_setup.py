"""The optimizer and its schedule, from whatever the user gave: objects, factories, a class, or nothing."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from forgather.ml.optim.opt_utils import make_grouped_optimizer, optimizer_of_nothing, warn_of_unknown_options
from forgather.ml.trainer.arguments import MinimalTrainingArguments
from forgather.ml.trainer.given_objects import check_optimizer, check_scheduler
from forgather.ml.trainer.trainer_types import LRSchedulerFactoryT, LRSchedulerT, OptimizerFactoryT, OptimizerT


def optimizer_factory(
    args: MinimalTrainingArguments,
    factory: OptimizerFactoryT | None,
    class_and_kwargs: tuple[type, dict[str, Any]] | None,
) -> OptimizerFactoryT:
    """What makes an optimizer of named parameters: the user's factory, class and options, or AdamW."""
    if factory is not None:
        return factory
    if class_and_kwargs is not None:
        cls, options = class_and_kwargs
        return lambda parameters: cls(parameters, **options)
    return lambda parameters: adamw(args, parameters)


def adamw(args: MinimalTrainingArguments, parameters: Iterable[Any]) -> torch.optim.AdamW:
    """AdamW in its fused implementation, which torch has for every device that a trainer runs on."""
    parameters = list(parameters)
    return torch.optim.AdamW(
        parameters,
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        weight_decay=args.weight_decay,
        fused=_fused_is_available(parameters),
    )


def _fused_is_available(parameters: list[Any]) -> bool:
    # A group instead of a parameter is that of a rank without any, which does as the others do.
    parameters = [entry for entry in parameters if not isinstance(entry, Mapping)]
    tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in parameters]
    return all(
        isinstance(tensor, torch.Tensor)
        and tensor.is_floating_point()
        and tensor.device.type in ("cpu", "cuda", "xpu", "mps")
        for tensor in tensors
    )


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    factory: OptimizerFactoryT,
    groups: Mapping[str, Any] | None,
    debug_groups: bool,
    names_elsewhere: Sequence[str] = (),
) -> OptimizerT:
    """An optimizer over the trainable parameters, by name, in groups when those are given.

    `names_elsewhere` are those of trainable parameters that other ranks have.
    """
    named = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    if not named and not names_elsewhere:
        raise ValueError("The model has no parameter that requires a gradient: there is nothing to train.")
    if groups is None:
        return check_optimizer("optimizer_factory", factory(named) if named else optimizer_of_nothing(factory))
    optimizer = make_grouped_optimizer(named, groups, factory, debug_groups, names_elsewhere)
    warn_of_unknown_options(optimizer, groups)
    return optimizer


def build_scheduler(
    args: MinimalTrainingArguments, optimizer: OptimizerT, factory: LRSchedulerFactoryT | None, num_steps: int
) -> LRSchedulerT:
    """The learning-rate schedule: the user's, or the one named by `lr_scheduler_type`."""
    if factory is not None:
        return check_scheduler("lr_scheduler_factory", factory(optimizer))
    # Imported here: most of transformers is of no use to a run that brings its own schedule.
    from transformers.optimization import get_scheduler

    try:
        return get_scheduler(
            args.lr_scheduler_type,
            optimizer,
            num_warmup_steps=args.warmup_steps,
            num_training_steps=num_steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"lr_scheduler_type={args.lr_scheduler_type!r} cannot be made with lr_scheduler_kwargs="
            f"{args.lr_scheduler_kwargs!r} and warmup_steps={args.warmup_steps}: {error}"
        ) from error
