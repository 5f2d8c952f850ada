"""Optimizer and learning-rate schedule construction from factories, a class with options, or the arguments.

Parameter groups are equal on all ranks of a pipeline, and a resumed run keeps the groups of its checkpoint.
`preparation` and `phases` call it.
"""

import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from forgather.ml.optim.named_optimizers import DEFAULT, class_and_options
from forgather.ml.optim.opt_utils import make_grouped_optimizer, optimizer_of_nothing, warn_of_unknown_options
from forgather.ml.trainer.arguments.training_arguments import MinimalTrainingArguments, TrainingArguments
from forgather.ml.trainer.setup.given_objects import check_optimizer, check_scheduler
from forgather.ml.trainer.setup.schedules import make_schedule
from forgather.ml.trainer.trainer_types import LRSchedulerFactoryT, LRSchedulerT, OptimizerFactoryT, OptimizerT

logger = logging.getLogger(__name__)

_NORM_CLASS = re.compile(r"Norm(\d+d)?(Gated|Fp32)?$")
# The names that transformers excludes from weight decay, except that "bias" must be a suffix: a layer may be called
# "unbiased".
_UNDECAYED_NAME = re.compile(r"bias(\.weight)?$|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def optimizer_factory(
    args: TrainingArguments,
    factory: OptimizerFactoryT | None,
    class_and_kwargs: tuple[type, dict[str, Any]] | None,
) -> OptimizerFactoryT:
    """Return the factory for the optimizer: the user's factory, class with options, or the optimizer named by `optim`."""
    if factory is not None:
        return factory
    if class_and_kwargs is not None:
        cls, options = class_and_kwargs
        return lambda parameters: cls(parameters, **options)
    if args.optim == DEFAULT:
        return lambda parameters: adamw(args, parameters)
    named, named_options = class_and_options(args)
    return lambda parameters: named(parameters, **named_options)


def adamw(args: MinimalTrainingArguments, parameters: Iterable[Any]) -> torch.optim.AdamW:
    """Return AdamW, with the fused implementation if all parameters support it."""
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
    # A mapping is an empty group of a rank without parameters. It must not change the choice.
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
    """Return an optimizer over the trainable parameters, in groups if `groups` is given.

    `names_elsewhere` has the FQNs of trainable parameters on other ranks.
    """
    named = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    # A pipeline rank may have no trainable parameter; it still needs an optimizer with the groups of the other ranks.
    if not named and not names_elsewhere:
        raise ValueError("No parameter of the model requires a gradient: there is nothing to train.")
    if groups is None:
        return check_optimizer("optimizer_factory", factory(named) if named else optimizer_of_nothing(factory))
    optimizer = make_grouped_optimizer(named, groups, factory, debug_groups, names_elsewhere)
    warn_of_unknown_options(optimizer, groups)
    return optimizer


def undecayed_names(model: nn.Module) -> set[str]:
    """Return the FQNs without weight decay: biases, norm weights, and parameters of less than two dimensions."""
    return {
        name
        for prefix, module in model.named_modules()
        for name, parameter in module.named_parameters(prefix, recurse=False)
        if parameter.requires_grad
        and (parameter.ndim < 2 or _NORM_CLASS.search(type(module).__name__) or _UNDECAYED_NAME.search(name.lower()))
    }


def group_weight_decay(
    optimizer: OptimizerT,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    undecayed: Collection[str],
    has_decayed: bool,
    wanted: str,
    stored: str | None,
) -> str:
    """Move parameters without weight decay into a separate group; return the effective `weight_decay_groups`.

    An optimizer with several groups or without weight decay is not changed. `undecayed` and `has_decayed` describe the
    full model, so that all ranks of a pipeline make the same groups. `stored` is the value in the checkpoint.
    """
    # A resumed run keeps the groups of its checkpoint: state and schedule are stored per group, and the updates must
    # be equal to an uninterrupted run.
    if len(optimizer.param_groups) != 1 or "weight_decay" not in optimizer.param_groups[0] or not undecayed:
        return "all"
    decay = optimizer.param_groups[0]["weight_decay"]
    if stored is not None and stored != wanted and decay:
        logger.info(
            "The parameter groups of the checkpoint are kept, with weight decay on %s: weight_decay_groups=%r applies to new "
            "runs only.",
            *("all parameters" if stored == "all" else "all parameters except biases and norms", wanted),
        )
    # Without weight decay both groups would be equal. A stored "auto" still keeps its two groups.
    if (stored or wanted) == "all" or not (decay or stored):
        return "all"
    if not has_decayed:
        optimizer.param_groups[0]["weight_decay"] = 0.0
        logger.warning(
            "weight_decay=%s has no effect: the model has only biases, norms and other parameters with less than two "
            "dimensions. Set weight_decay_groups='all' to decay them.",
            decay,
        )
        return "auto"
    _split_off(optimizer, {parameter for name, parameter in named_parameters if name in undecayed})
    return "auto"


def _split_off(optimizer: OptimizerT, undecayed: Collection[Tensor]) -> None:
    """Move parameters into a second group without weight decay; either group may be empty on a pipeline rank."""
    group = optimizer.param_groups[0]
    has_names = "param_names" in group
    members = list(zip(group["params"], group.get("param_names", group["params"]), strict=True))
    kept, moved = ([one for one in members if (one[0] in undecayed) == is_moved] for is_moved in (False, True))
    # Clone tensor options, such as a tensor lr: two groups must not share a tensor that is updated in place.
    options = {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}
    options |= {"params": [(name, parameter) if has_names else parameter for parameter, name in moved]}
    options |= {"weight_decay": 0.0}
    options.pop("param_names", None)
    if has_names:
        group["param_names"] = [name for _, name in kept]
        # Torch reads names from the members, and rejects an optimizer with names in only some groups.
        options |= {} if moved else {"param_names": []}
    group["params"] = [parameter for parameter, _ in kept]
    optimizer.add_param_group(options)


def build_scheduler(
    args: MinimalTrainingArguments, optimizer: OptimizerT, factory: LRSchedulerFactoryT | None, num_steps: int
) -> LRSchedulerT:
    """Return the user's learning-rate schedule, or the schedule named by `lr_scheduler_type`."""
    if factory is not None:
        return check_scheduler("lr_scheduler_factory", factory(optimizer))
    try:
        return make_schedule(args.lr_scheduler_type, optimizer, args.warmup_steps, num_steps, args.lr_scheduler_kwargs)
    except (TypeError, ValueError) as error:
        # The errors of transformers do not name the argument.
        raise ValueError(
            f"lr_scheduler_type={args.lr_scheduler_type!r} cannot be made with lr_scheduler_kwargs="
            f"{args.lr_scheduler_kwargs!r} and warmup_steps={args.warmup_steps}: {error}"
        ) from error
