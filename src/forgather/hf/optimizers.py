"""Optimizer and schedule of the facade, for subclasses that override a part of their creation.

Without such overrides the engine creates both. The classes and options by name come from transformers.
"""

import inspect
import logging
from typing import TYPE_CHECKING, Any

from torch import nn

from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.setup.optimizer_construction import build_scheduler, undecayed_names

if TYPE_CHECKING:
    from forgather.hf.trainer import Trainer

logger = logging.getLogger(__name__)


def check_sources(trainer: "Trainer", optimizers: Any) -> None:
    """Raise ValueError for a second source of the optimizer or of the model, which would be ignored."""
    given = [one for one in optimizers if one is not None]
    if trainer.optimizer_cls_and_kwargs is not None and optimizers[0] is not None:
        raise ValueError("Pass only one of optimizers and optimizer_cls_and_kwargs: both choose the optimizer.")
    if trainer.model_init is not None and given:
        raise ValueError(
            "optimizers cannot be used with model_init: each training builds the model again, and the optimizer would update "
            "the parameters of another model. Pass optimizer_cls_and_kwargs, or override create_optimizer."
        )


def with_decay(chosen: tuple[type, dict[str, Any]] | None, args: Any) -> tuple[type, dict[str, Any]] | None:
    """Return optimizer_cls_and_kwargs with the weight decay of the arguments, which transformers uses for any class."""
    # Wrong types are left to the engine, which explains them.
    if not (isinstance(chosen, tuple) and len(chosen) == 2 and isinstance(chosen[1], dict)):
        return chosen
    cls, options = chosen
    if not _takes_decay(cls):
        return chosen
    asked = options.get("weight_decay", args.weight_decay)
    if asked != args.weight_decay:
        logger.warning(
            "weight_decay=%r of optimizer_cls_and_kwargs has no effect: as in transformers, weight_decay=%r of the arguments "
            "is used.",
            asked,
            args.weight_decay,
        )
    return cls, {**options, "weight_decay": args.weight_decay}


def _takes_decay(cls: type) -> bool:
    try:
        return "weight_decay" in inspect.signature(cls).parameters
    except (TypeError, ValueError):
        # Classes written in C may have no signature.
        return False


def make_optimizer(trainer: "Trainer", model: Any) -> Any:
    """Return the optimizer with two groups of parameters: with weight decay and without."""
    decayed = set(trainer.get_decay_parameter_names(model))
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [one for name, one in named if name in decayed], "weight_decay": trainer.args.weight_decay},
        {"params": [one for name, one in named if name not in decayed], "weight_decay": 0.0},
    ]
    chosen = trainer.optimizer_cls_and_kwargs
    cls, options = trainer.get_optimizer_cls_and_kwargs(trainer.args, model) if chosen is None else chosen
    return cls(groups, **options)


def make_scheduler(args: TrainingArguments, optimizer: Any, num_steps: int) -> Any:
    return build_scheduler(args, optimizer, None, num_steps)


def decayed_names(model: nn.Module) -> list[str]:
    undecayed = undecayed_names(model)
    return [name for name, _ in model.named_parameters() if name not in undecayed]
