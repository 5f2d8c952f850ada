"""Settings that are part of other fields or come from the environment: options of FSDP, accelerate and other strategies.

Options without an effect are logged once, and contradictions raise ValueError. `engine_arguments` calls it at the
construction of a trainer.
"""

import logging
import os
from collections.abc import Mapping
from typing import Any

from transformers.trainer_pt_utils import AcceleratorConfig

from forgather.hf.fields.conversions import as_flag

logger = logging.getLogger(__name__)

_FSDP_OPTIONS = ("reshard_after_forward", "cpu_offload", "activation_checkpointing")
_FSDP_DEFAULTS: Mapping[str, Any] = {
    "min_num_params": 0,
    "version": 2,
    "xla": False,
    "xla_fsdp_v2": False,
    "xla_fsdp_grad_ckpt": False,
    "state_dict_type": "FULL_STATE_DICT",
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
}
"""Values that transformers fills in, or that describe how Forgather shards a model anyway."""
_ACCELERATOR_REASONS = {
    "even_batches": "samples are never repeated to fill up batches.",
    "use_seedable_sampler": "the data order always follows from the seed.",
    "non_blocking": "batches are always copied without blocking.",
    "gradient_accumulation_kwargs": "gradients are reduced once per step.",
    "use_configured_state": "accelerate does not divide the work.",
}
_STRATEGIES_OF_FIELDS = {
    "fg_shard_optimizer": ("ddp",),
    "fg_n_microbatches": ("pipeline", "hybrid"),
    "fg_stages_per_rank": ("pipeline", "hybrid"),
    "fg_pipe_schedule": ("pipeline", "hybrid"),
    "fg_pp_size": ("hybrid",),
}


def check_other_settings(args: Any, strategy: str) -> None:
    """Log options without an effect; raise ValueError for settings that contradict each other."""
    _check_strategy(args, strategy)
    for name, value, reason in (*_unused_fsdp(args), *_unused_accelerator(args), *_unused_own(args, strategy)):
        logger.warning("%s=%r has no effect: %s", name, value, reason)


def asks_for_fsdp(args: Any) -> bool:
    """Return whether the arguments, or the configuration of `accelerate launch`, ask for FSDP."""
    return bool(args.fsdp) or from_environment("ACCELERATE_USE_FSDP")


def from_environment(name: str) -> bool:
    """Return a flag that `accelerate launch` sets."""
    return as_flag(os.environ.get(name, ""))


def _check_strategy(args: Any, strategy: str) -> None:
    if args.fsdp and strategy != "fsdp2":
        raise ValueError(
            f"fsdp={args.fsdp!r} cannot be used with fg_strategy={strategy!r}: the strategy does not shard the model. Remove "
            "fsdp, or set fg_strategy='fsdp2'."
        )
    if from_environment("ACCELERATE_USE_DEEPSPEED"):
        raise ValueError(
            "DeepSpeed cannot be used: it has its own engine, and the configuration of accelerate asks for it "
            "(ACCELERATE_USE_DEEPSPEED). Start the script with torchrun, and set fsdp=True, or fg_shard_optimizer=True for "
            "ZeRO-1."
        )
    if not args.fsdp and from_environment("ACCELERATE_USE_FSDP"):
        logger.warning(
            "accelerate launch asks for FSDP, so fg_strategy is %r. Its other FSDP options have no effect: set them in "
            "fsdp_config.",
            strategy,
        )


def _unused_fsdp(args: Any) -> list[tuple[str, Any, str]]:
    config = (args.fsdp_config or {}) if args.fsdp else {}
    names = [name for name in config if name not in _FSDP_OPTIONS and config[name] != _FSDP_DEFAULTS.get(name)]
    reason = "fsdp2 wraps the layers of the model, and saves complete weights."
    return [(f"fsdp_config[{name!r}]", config[name], reason) for name in sorted(names)]


def _unused_accelerator(args: Any) -> list[tuple[str, Any, str]]:
    config, default = args.accelerator_config, AcceleratorConfig()
    if config is None:
        return []
    values = {name: getattr(config, name, getattr(default, name)) for name in _ACCELERATOR_REASONS}
    asked = [name for name, value in values.items() if value != getattr(default, name)]
    return [(f"accelerator_config[{name!r}]", values[name], _ACCELERATOR_REASONS[name]) for name in asked]


def _unused_own(args: Any, strategy: str) -> list[tuple[str, Any, str]]:
    unused = []
    for name, strategies in _STRATEGIES_OF_FIELDS.items():
        value = getattr(args, name, None)
        if value and strategy not in strategies:
            reason = f"it belongs to fg_strategy={' or '.join(map(repr, strategies))}, and this run has {strategy!r}."
            unused.append((name, value, reason))
    return unused
