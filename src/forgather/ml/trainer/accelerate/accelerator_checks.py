"""Accelerate checks: settings of an Accelerator that AccelTrainer supports, and unwrapping of prepared objects.

Every process must hold the full model, and the arguments must not contradict the accelerator. Called by `AccelTrainer`
when it is created.
"""

import logging
from typing import Any

from forgather._extras import MissingPackageError, missing_message

try:
    from accelerate import Accelerator  # type: ignore[import-untyped]
    from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]
    from accelerate.scheduler import AcceleratedScheduler  # type: ignore[import-untyped]
except ModuleNotFoundError as missing:
    raise MissingPackageError(f"{missing_message('AccelTrainer', 'accelerate')}.") from missing

from forgather.ml.distributed import (
    DistributedEnvInterface,
    StaticDistributedEnvironment,
    get_local_world_size,
    get_world_size,
)
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments

__all__ = ["AcceleratedOptimizer", "AcceleratedScheduler", "Accelerator"]

logger = logging.getLogger(__name__)


def check_against_arguments(accelerator: Accelerator, args: TrainingArguments) -> None:
    """Raise ValueError for arguments that contradict the accelerator, which decides on device and precision."""
    device = accelerator.device
    contradictions = {
        "mixed_precision": args.mixed_precision not in (None, accelerator.mixed_precision),
        "use_cpu": args.use_cpu and device.type != "cpu",
        "device": args.device is not None and str(args.device) not in (str(device), device.type),
    }
    for name, is_contradicted in contradictions.items():
        if is_contradicted:
            raise ValueError(
                f"{name}={getattr(args, name)!r} contradicts the accelerator, which has "
                f"mixed_precision={accelerator.mixed_precision!r} on device {device}. Remove {name} from the arguments, "
                "or create the Accelerator with the same setting (mixed_precision=..., cpu=True)."
            )


def require_usable(accelerator: Accelerator) -> None:
    """Raise ValueError unless `accelerator` is an Accelerator that keeps the full model in each process."""
    if not isinstance(accelerator, Accelerator):
        raise ValueError(
            f"accelerator must be an accelerate.Accelerator, but is {accelerator!r}: pass accelerator=Accelerator()."
        )
    # "NO" is one process; the MULTI_ types are DDP on some kind of device. All others, such as FSDP, shard the model.
    kind = str(accelerator.distributed_type.value)
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise ValueError(
            f"AccelTrainer cannot use an accelerator that was set up for {kind}: it supports one process or DDP, with the "
            f"full model in each process, and {kind} handles model and gradients differently. Create "
            "the Accelerator without that plugin, and remove it from the configuration of `accelerate launch` "
            "(variables ACCELERATE_USE_...)."
        )
    sizes = accelerator.parallelism_config
    if sizes is not None and sizes.total_size != sizes.dp_replicate_size:
        raise ValueError(
            f"AccelTrainer cannot use the accelerator's {sizes}: every process must hold the full model. Remove "
            "parallelism_config."
        )
    if accelerator.mixed_precision == "fp8":
        raise ValueError(
            "AccelTrainer cannot use an accelerator with mixed_precision='fp8': it replaces layers of the model, so "
            "checkpoints would fit no other trainer. Use 'bf16', 'fp16' or 'no'."
        )
    if accelerator.mixed_precision != "no" and not accelerator.native_amp:
        logger.warning(
            "The accelerator has mixed_precision=%r, but does not apply it on %s: training runs in full precision.",
            accelerator.mixed_precision,
            accelerator.device,
        )


def environment_of(accelerator: Accelerator, given: DistributedEnvInterface | None) -> DistributedEnvInterface:
    """Return the accelerator's environment (rank, world size, device), or `given` if rank and world size agree."""
    rank, world_size = accelerator.process_index, accelerator.num_processes
    if given is not None:
        if (given.rank, given.world_size) != (rank, world_size):
            raise ValueError(
                f"distributed_env has rank {given.rank} of {given.world_size}, but the accelerator has rank {rank} of "
                f"{world_size}. Remove distributed_env: the accelerator provides it."
            )
        return given
    if world_size == 1 < get_world_size():
        raise ValueError(
            f"This process is one of {get_world_size()} (WORLD_SIZE), but the accelerator was set up for one: each would "
            "train separately and write to the same output directory. Without a GPU, create it with Accelerator(cpu=True)."
        )
    return StaticDistributedEnvironment(
        rank=rank,
        local_rank=accelerator.local_process_index,
        world_size=world_size,
        local_world_size=get_local_world_size() if world_size > 1 else 1,
        device=str(accelerator.device),
        device_type=accelerator.device.type,
    )


def taken_apart(accelerator: Accelerator, trainer_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the trainer's arguments with objects that the user has prepared unwrapped."""
    # The trainer prepares them itself. Checkpoints hold the state of the inner objects.
    plain = dict(trainer_kwargs)
    if plain.get("model") is not None:
        plain["model"] = accelerator.unwrap_model(plain["model"])
    if isinstance(plain.get("optimizer"), AcceleratedOptimizer):
        plain["optimizer"] = plain["optimizer"].optimizer
    if isinstance(plain.get("lr_scheduler"), AcceleratedScheduler):
        plain["lr_scheduler"] = plain["lr_scheduler"].scheduler
    return plain
