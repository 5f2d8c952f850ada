"""Conversions of values of `transformers.TrainingArguments` to values of Forgather's arguments.

Each function returns the arguments of the engine that a field sets. The rows of `field_map` name them.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

Values = Mapping[str, Any]

NEVER = 2**31 - 1
"""Number of steps for an action that no step triggers."""
_SCHEDULES_BY_METRIC = ("reduce_lr_on_plateau", "greedy")
_SAMPLING = ("random", "sequential", "group_by_length")


def text_of(value: object) -> Any:
    """Return the value of an enumeration member; other values unchanged."""
    return getattr(value, "value", value)


def nothing(args: Any) -> Values:
    """Return no value: another row or the engine handles the field."""
    return {}


def max_steps(args: Any) -> Values:
    if args.max_steps > 0:
        return {"max_steps": args.max_steps}
    # As in transformers, a number of epochs that is not positive trains no step.
    return {"max_steps": -1 if args.num_train_epochs > 0 else 0}


def save_total_limit(args: Any) -> Values:
    limit = args.save_total_limit
    return {"save_total_limit": limit if limit is not None and limit > 0 else None}


def schedule(args: Any) -> Values:
    name = text_of(args.lr_scheduler_type)
    if name in _SCHEDULES_BY_METRIC:
        raise ValueError(
            f"lr_scheduler_type={name!r} cannot be used: the schedule needs a metric at every step. Choose another schedule, "
            "or pass the scheduler as optimizers=(optimizer, scheduler)."
        )
    return {"lr_scheduler_type": name}


def optim(args: Any) -> Values:
    return {"optim": text_of(args.optim)}


def precision(args: Any) -> Values:
    name = getattr(args, "mixed_precision", "no")
    return {"mixed_precision": name if name in ("bf16", "fp16") else None}


def tf32(args: Any) -> Values:
    if args.tf32 is None:
        return {}
    return {"float32_matmul_precision": "high" if args.tf32 else "highest"}


def compile_mode(args: Any) -> Values:
    return {} if args.torch_compile_mode is None else {"torch_compile_mode": args.torch_compile_mode}


def strategy(name: str) -> Callable[[Any], Values]:
    return lambda args: {name: text_of(getattr(args, name))}


def steps(name: str) -> Callable[[Any], Values]:
    """Return the conversion of a number of steps; the engine computes a fraction when the length of the run is known."""

    def convert(args: Any) -> Values:
        value = getattr(args, name)
        return {name: int(value)} if value is not None and value >= 1 else {}

    return convert


def fractions(args: Any) -> dict[str, float]:
    """Return the fields that are fractions of the run."""
    names = ("logging_steps", "eval_steps", "save_steps", "warmup_steps")
    values = {name: getattr(args, name) for name in names}
    return {name: float(value) for name, value in values.items() if value is not None and 0 < value < 1}


def eval_delay(args: Any) -> Values:
    # With eval_strategy="epoch" the delay counts epochs, and the engine converts it. `set_evaluate` sets None.
    return {} if text_of(args.eval_strategy) == "epoch" else {"eval_delay": math.ceil(args.eval_delay or 0)}


def save_strategy(args: Any) -> Values:
    name = text_of(args.save_strategy)
    return {"save_strategy": "steps", "save_steps": NEVER} if name == "best" else {"save_strategy": name}


def best_metric(args: Any) -> Values:
    return {} if args.metric_for_best_model is None else {"metric_for_best_model": args.metric_for_best_model}


def data_skip(args: Any) -> Values:
    return {"skip_checkpoint_components": ["dataset"]} if args.ignore_data_skip else {}


def is_same_seed(args: Any) -> bool:
    return bool(args.data_seed == args.seed)


def is_default_start_method(args: Any) -> bool:
    return bool(args.dataloader_multiprocessing_context == torch.multiprocessing.get_start_method())


def sampling(args: Any) -> Values:
    name = args.train_sampling_strategy
    if name not in _SAMPLING:
        raise ValueError(
            f"train_sampling_strategy={name!r} cannot be used: choose one of {', '.join(map(repr, _SAMPLING))}, or override "
            "_get_train_sampler."
        )
    return {"train_sampling_strategy": name}


def accelerator(args: Any) -> Values:
    config = args.accelerator_config
    if getattr(config, "split_batches", False):
        raise ValueError(
            "accelerator_config split_batches=True cannot be used: batch sizes are per device. Set "
            "per_device_train_batch_size to the size of a batch divided by the number of ranks."
        )
    asked = getattr(config, "dispatch_batches", None)
    return {} if asked is None else {"dispatch_batches": asked}


def ddp(args: Any) -> Values:
    names = ("find_unused_parameters", "bucket_cap_mb", "broadcast_buffers", "static_graph")
    asked = {name: getattr(args, f"ddp_{name}") for name in names}
    return {"ddp": {name: value for name, value in asked.items() if value is not None}}


def fsdp(args: Any) -> Values:
    if not args.fsdp:
        return {}
    config = args.fsdp_config or {}
    if config.get("xla"):
        raise ValueError("fsdp_config['xla'] cannot be used: Forgather does not train on XLA devices. Remove it.")
    options = {name: config[name] for name in ("reshard_after_forward", "cpu_offload") if name in config}
    values: dict[str, Any] = {"fsdp2": {name: as_flag(value) for name, value in options.items()}}
    if as_flag(config.get("activation_checkpointing", False)):
        values["gradient_checkpointing"] = True
    return values


def as_flag(value: object) -> bool:
    """Return a flag of a JSON file, where it may be text."""
    return value.lower() in ("true", "1", "yes", "full_shard") if isinstance(value, str) else bool(value)
