"""Out-of-memory advice: settings that would save memory in this run, are off, and would be accepted.

Each proposal is a change of the arguments. The checks of the arguments and of the trainer decide whether it is valid.
"""

import copy
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from forgather.ml.trainer.diagnostics.memory_use import MemoryUse, modules_of
from forgather.ml.trainer.setup import phases
from forgather.ml.trainer.setup.model_modes import enable_hf_activation_checkpointing
from forgather.ml.trainer.setup.step_plan import batch_size_of

if TYPE_CHECKING:
    from forgather.ml.trainer.trainer import Trainer

_WASTED = 0.1
"""Fraction of the device memory that is reserved but unused, above which fragmentation is worth a remedy."""


class Proposal(NamedTuple):
    """Setting, its effect, and the part of the memory that it reduces."""

    setting: str
    effect: str
    reduces_state: bool = False

    def __str__(self) -> str:
        return f"{self.setting}: {self.effect}"


def proposals(trainer: "Trainer[Any]", use: MemoryUse) -> list[Proposal]:
    """Return the settings that would help in this run, first for the larger of state and activations."""
    found = [*_for_activations(trainer), *_for_state(trainer)]
    state_is_larger = use.state > use.rest
    found.sort(key=lambda one: one.reduces_state != state_is_larger)
    return [*_for_fragmentation(trainer, use), *found, *_for_small_devices(trainer, use)]


def is_accepted(trainer: "Trainer[Any]", **changes: object) -> bool:
    """Return whether a trainer like this one, with other arguments, would pass the checks of the constructor."""
    # The checks only read the trainer, so a shallow copy with changed arguments is enough to try a setting.
    probe = copy.copy(trainer)
    try:
        probe.args = dataclasses.replace(copy.deepcopy(trainer.args), **changes)
        phases.refuse(probe)
    except ValueError:
        return False
    return True


def _for_activations(trainer: "Trainer[Any]") -> Iterator[Proposal]:
    args = trainer.args
    if _can_checkpoint(trainer) and is_accepted(trainer, gradient_checkpointing=True):
        yield Proposal("gradient_checkpointing=True", "recomputes activations in the backward pass")
    yield from _smaller_batches(trainer)
    yield from _mixed_precision(trainer)
    if _can_fuse_loss(trainer):
        yield Proposal("fused_loss_factory=LinearCrossEntropyLoss", "never allocates the full logits tensor")
    if not args.enable_activation_offloading and is_accepted(trainer, enable_activation_offloading=True):
        yield Proposal("enable_activation_offloading=True", "keeps activations in CPU memory; slower")
    budget = args.activation_memory_budget
    if args.torch_compile and (budget is None or budget > 0.5) and is_accepted(trainer, activation_memory_budget=0.5):
        yield Proposal("activation_memory_budget=0.5", "compiled graphs keep half of their activations")


def _can_checkpoint(trainer: "Trainer[Any]") -> bool:
    function = trainer.enable_activation_checkpoint_fn
    # "selective" checkpointing still keeps the results of matrix products.
    if trainer.args.gradient_checkpointing not in (False, "selective") or function is None:
        return False
    return function is not enable_hf_activation_checkpointing or hasattr(
        _whole_model(trainer), "gradient_checkpointing_enable"
    )


def _smaller_batches(trainer: "Trainer[Any]") -> Iterator[Proposal]:
    args = trainer.args
    size, num_passes = args.per_device_train_batch_size, args.gradient_accumulation_steps
    if batch_size_of(trainer.train_dataset, size) != size:
        yield Proposal("a smaller batch size of the DataLoader that you passed", "fewer activations per pass")
        return
    half = {"per_device_train_batch_size": size // 2, "gradient_accumulation_steps": num_passes * 2}
    single = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": num_passes * size}
    if args.global_batch_size is not None:
        # Accumulation follows from global_batch_size, and a given number would contradict it.
        half, single = (dict(list(one.items())[:1]) for one in (half, single))
    if size > 1 and size % 2 == 0 and is_accepted(trainer, **half):
        yield Proposal(_assignments(half), "half of the activations, the same result")
    elif size > 1 and is_accepted(trainer, **single):
        yield Proposal(_assignments(single), "activations of one sample, the same result")
    number = getattr(args, "n_microbatches", None)
    if number is not None and is_accepted(trainer, n_microbatches=number * 2):
        yield Proposal(f"n_microbatches={number * 2}", "smaller micro-batches in the pipeline")
    if size == 1:
        yield Proposal("shorter sequences", "the batch has one sample already")


def _mixed_precision(trainer: "Trainer[Any]") -> Iterator[Proposal]:
    if trainer.args.mixed_precision not in (None, "no") or not _has_float32_weights(trainer):
        return
    if hasattr(trainer, "accelerator"):
        yield Proposal("Accelerator(mixed_precision='bf16')", "activations of half the size")
    elif is_accepted(trainer, mixed_precision="bf16"):
        yield Proposal("mixed_precision='bf16'", "activations of half the size")


def _can_fuse_loss(trainer: "Trainer[Any]") -> bool:
    """Return whether a fused loss would probably be accepted; the full check runs the model."""
    loss = getattr(trainer, "step_loss", None)
    if trainer.use_fused_loss or trainer.given.loss_fn is not None or (loss is not None and loss.uses_own):
        return False
    # DDP and zero-bubble schedules refuse it.
    ddp, schedule = getattr(trainer.args, "ddp", None), getattr(trainer, "_schedule", None)
    if getattr(ddp, "find_unused_parameters", False) or (schedule is not None and schedule.traits.splits_backward):
        return False
    find_head = getattr(_whole_model(trainer), "get_output_embeddings", None)
    return callable(find_head) and isinstance(find_head(), nn.Module)


def _for_state(trainer: "Trainer[Any]") -> Iterator[Proposal]:
    args = trainer.args
    for name, value in _shorter_weights(trainer):
        if is_accepted(trainer, **{name: value}):
            yield Proposal(f"{name}={value!r}", "half of parameters, gradients and moments, with rounding", True)
            break
    # In a pipeline, tied weights refuse it after the stages are built.
    can_fuse = trainer.team.size == 1 and not hasattr(trainer, "accelerator") and not args.fuse_optim_with_backward
    if can_fuse and is_accepted(trainer, fuse_optim_with_backward=True):
        effect = "applies and frees each gradient in the backward pass"
        yield Proposal("fuse_optim_with_backward=True", effect, True)
    yield from _sharded_moments(trainer)
    if args.ema_decay is not None and is_accepted(trainer, ema_decay=None, eval_ema=False):
        yield Proposal("ema_decay=None", "no averaged copy of the weights", True)


def _sharded_moments(trainer: "Trainer[Any]") -> Iterator[Proposal]:
    ddp, num_ranks = getattr(trainer.args, "ddp", None), trainer.team.size
    if ddp is None or ddp.shard_optimizer or num_ranks == 1:
        return
    if is_accepted(trainer, ddp=dataclasses.replace(ddp, shard_optimizer=True)):
        effect = f"divides the moments between {num_ranks} ranks, the same result"
        yield Proposal("ddp.shard_optimizer=True", effect, True)


def _shorter_weights(trainer: "Trainer[Any]") -> Iterator[tuple[str, str]]:
    """Yield the settings for bfloat16 weights, the more precise first."""
    precision = getattr(trainer.args, "param_precision", None)
    is_float32 = _has_float32_weights(trainer)
    if precision == "bf16_master" or (precision == "fp32" and is_float32):
        yield "param_precision", "bf16_stochastic"
    if precision in (None, "fp32") and is_float32 and trainer.args.default_dtype is None:
        yield "default_dtype", "bfloat16"


def _for_fragmentation(trainer: "Trainer[Any]", use: MemoryUse) -> Iterator[Proposal]:
    if trainer.device.type != "cuda" or use.unused <= _WASTED * use.total:
        return
    if "expandable_segments:True" not in torch._C._accelerator_getAllocatorSettings():
        yield Proposal(
            "PYTORCH_ALLOC_CONF=expandable_segments:True (environment variable)", "less fragmentation of the memory"
        )


def _for_small_devices(trainer: "Trainer[Any]", use: MemoryUse) -> Iterator[Proposal]:
    if use.state > use.total / 2 and not trainer._is_model_parallel():
        effect = "divides parameters, gradients and moments, which fill more than half of this device, between devices"
        yield Proposal("FSDP2Trainer, PipelineTrainer or HybridTrainer", effect)


def _has_float32_weights(trainer: "Trainer[Any]") -> bool:
    parameters = (parameter for module in modules_of(trainer) for parameter in module.parameters())
    return any(parameter.dtype == torch.float32 for parameter in parameters)


def _whole_model(trainer: "Trainer[Any]") -> nn.Module | None:
    return trainer._whole_model() if modules_of(trainer) else None


def _assignments(changes: dict[str, int]) -> str:
    return " with ".join(f"{name}={value}" for name, value in changes.items())
