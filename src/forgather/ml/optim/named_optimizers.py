"""Optimizers by name (`optim`, `optim_args`), with the names and options of `transformers.TrainingArguments`.

transformers supplies class and options. Refused here, before any work: names with a missing package, and optimizers that
need more than parameter groups. The arguments check the names, and `optimizer_construction` builds the optimizer.
"""

import inspect
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from forgather._extras import install_command, is_installed, missing_message

DEFAULT = "adamw_torch"
FUSED = "adamw_torch_fused"

_OF_BITSANDBYTES = (
    *("adamw_bnb_8bit", "adamw_8bit", "ademamix", "ademamix_8bit", "lion_8bit", "lion_32bit"),
    *("paged_adamw_32bit", "paged_adamw_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit"),
    *("paged_lion_32bit", "paged_lion_8bit", "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"),
)
_OF_TORCHAO = ("adamw_torch_4bit", "adamw_torch_8bit")
_PACKAGES: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(_OF_BITSANDBYTES, ("bitsandbytes", "pip install bitsandbytes")),
    **dict.fromkeys(_OF_TORCHAO, ("torchao", install_command("torchao"))),
    "adamw_torch_xla": ("torch_xla", "pip install torch_xla"),
    "adamw_torch_npu_fused": ("torch_npu", "pip install torch_npu"),
    "adamw_anyprecision": ("torchdistx", "pip install torchdistx"),
    "grokadamw": ("grokadamw", "pip install grokadamw"),
    "stable_adamw": ("optimi", "pip install torch-optimi"),
}
"""Package and command that installs it, by the name of the optimizer."""
_LOW_RANK = (
    "it projects the gradients of chosen linear layers. Pass optimizer_factory, which builds its parameter groups"
)
_IN_BACKWARD = (
    "it updates parameters in its own backward pass. Use another optimizer with fuse_optim_with_backward=True, which frees "
    "gradients in the same way"
)
_WITH_MODES = (
    "its weights differ between training and evaluation, so checkpoints and evaluations would see the wrong ones. Use "
    "another optimizer; ema_decay gives averaged weights"
)
_REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("galore_adamw", "galore_adamw_8bit", "galore_adafactor", "apollo_adamw", "apollo_adamw_layerwise"),
            *("galore_adamw_layerwise", "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise"),
        ),
        _LOW_RANK,
    ),
    **dict.fromkeys(("lomo", "adalomo"), _IN_BACKWARD),
    **dict.fromkeys(("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"), _WITH_MODES),
}

_BY_SHARD = (
    "its state describes full parameters, but each rank has a shard. Use another optimizer, such as 'adamw_torch'."
)
WHOLE_PARAMETERS: Mapping[str, str] = dict.fromkeys(("adafactor", *_OF_TORCHAO), _BY_SHARD)
"""Optimizers that cannot update shards of parameters, with the reason."""

OPTIMIZER_NAMES = (DEFAULT, FUSED, "adafactor", "sgd", "adagrad", "rmsprop", *_PACKAGES, *_REFUSED)
"""Names of `transformers`. Listed here, because importing transformers takes seconds."""


def parsed_options(text: str | None) -> dict[str, str]:
    """Return the options in "name=value, name=value"; raise ValueError for another form."""
    options: dict[str, str] = {}
    for part in (text or "").replace(" ", "").split(","):
        name, separator, value = part.partition("=")
        if part and (not name or not separator or "=" in value):
            raise ValueError(
                f"optim_args={text!r} cannot be used: {part!r} is not of the form name=value. Write options as "
                "'momentum=0.9, nesterov=true'."
            )
        if part:
            options[name] = value
    return options


def require_optimizer(args: Any, has_own: bool) -> None:
    """Raise ValueError for an optimizer that cannot be built, or a name without effect beside a given optimizer."""
    if has_own:
        # Both are AdamW, so their names ask for nothing special.
        if args.optim not in (DEFAULT, FUSED) or args.optim_args:
            raise ValueError(
                f"optim={args.optim!r} with optim_args={args.optim_args!r} has no effect beside an optimizer, "
                "optimizer_factory or optimizer_cls_and_kwargs. Remove one of the two."
            )
        return
    if args.optim in _REFUSED:
        raise ValueError(f"optim={args.optim!r} cannot be used: {_REFUSED[args.optim]}.")
    if args.optim in _PACKAGES:
        package, command = _PACKAGES[args.optim]
        if not is_installed(package):
            raise ValueError(f"{missing_message(f'optim={args.optim!r}', package, command)}.")
    if args.optim != DEFAULT or args.optim_args:
        _require_used(args, class_and_options(args)[1])


def class_and_options(args: Any) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return class and options of the optimizer that `optim` names, as transformers chooses them."""
    from transformers import Trainer
    from transformers.training_args import OptimizerNames

    # The class of transformers is not needed: our arguments have the attributes that it reads.
    settings: Any = SimpleNamespace(**{**args.to_dict(), "optim": OptimizerNames(args.optim)})
    try:
        cls, options = Trainer.get_optimizer_cls_and_kwargs(settings)
    except (ImportError, ValueError, TypeError) as error:
        raise ValueError(f"optim={args.optim!r} with optim_args={args.optim_args!r} cannot be used: {error}") from error
    if "weight_decay" in inspect.signature(cls).parameters:
        options.setdefault("weight_decay", args.weight_decay)
    if args.optim in _OF_TORCHAO:
        from forgather.ml.optim.plain_states import with_plain_states

        # The option is text in transformers.
        cls, options["block_size"] = with_plain_states(cls), int(options["block_size"])
    return cls, options


def _require_used(args: Any, options: Mapping[str, Any]) -> None:
    """Raise ValueError for options that the optimizer would ignore."""
    # AdEMAMix combines its options into tuples, so they cannot be found by name.
    given = {} if "ademamix" in args.optim else parsed_options(args.optim_args)
    unused = [name for name, value in given.items() if name not in options or not _is_same(options[name], value)]
    if unused:
        raise ValueError(
            f"optim_args={args.optim_args!r} cannot be used: optim={args.optim!r} does not read {', '.join(unused)}. Remove "
            "these options, or pass optimizer_cls_and_kwargs to the trainer."
        )


def _is_same(option: object, text: str) -> bool:
    if isinstance(option, bool):
        return option == (text.lower() in ("true", "1", "yes"))
    try:
        return float(str(option)) == float(text)
    except ValueError:
        return str(option) == text
