"""Validation of training arguments that depend on each other: invalid combinations, with the setting to change.

Each check raises ValueError when the arguments are created, before a trainer exists. The `__post_init__` methods of the
argument classes call them.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from forgather.ml.trainer.arguments.field_values import check_size

if TYPE_CHECKING:
    from forgather.ml.trainer.arguments.minimal_arguments import MinimalTrainingArguments
    from forgather.ml.trainer.arguments.training_arguments import BaseTrainingArguments, TrainingArguments

SDPA_BACKENDS = ("math", "flash", "efficient", "cudnn")
METRIC_INPUTS = ("inputs", "loss")
PARAM_PRECISIONS = ("fp32", "bf16_master", "bf16_stochastic")


def checked_numbers(name: str, values: Sequence[object], least: int) -> list[int]:
    """Return the numbers in ascending order, each once; raise ValueError for anything but whole numbers."""
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(
                f"{name}={list(values)!r} cannot be used: {value!r} is not a whole number of {least} or more."
            )
        check_size(name, value)
    return sorted({value for value in values if isinstance(value, int)})


def check_length(args: "MinimalTrainingArguments") -> None:
    """Raise ValueError for a number of steps below -1, and for a number of epochs that decides and is no length."""
    if args.max_steps < -1:
        raise ValueError(
            f"max_steps={args.max_steps} cannot be used: set the number of steps, or -1 to train for num_train_epochs."
        )
    epochs = args.num_train_epochs
    if args.max_steps == -1 and epochs != -1 and not 0 < epochs < math.inf:
        raise ValueError(
            f"num_train_epochs={epochs} cannot be used: set a number of epochs above 0, or -1 for no limit. max_steps=0 trains "
            "no step."
        )


def check_checkpointing(args: "MinimalTrainingArguments") -> None:
    """Raise ValueError for unknown modes of activation checkpointing, and for a compiler backend that breaks dropout."""
    mode: object = args.gradient_checkpointing
    if isinstance(mode, str) and mode.lower() in ("true", "false"):
        mode = args.gradient_checkpointing = mode.lower() == "true"
    if not (isinstance(mode, bool) or mode in ("full", "selective") or callable(mode)):
        raise ValueError(
            f"gradient_checkpointing={mode!r} cannot be used: choose False, True (the same as 'full'), 'full', 'selective', "
            "or a function of (rank, module) that enables it."
        )
    if mode is not False and args.torch_compile and args.torch_compile_backend == "eager":
        raise ValueError(
            "gradient_checkpointing cannot be combined with torch_compile_backend='eager': this backend recomputes "
            "activations with new random numbers, so dropout would give wrong gradients. Use 'aot_eager' or inductor."
        )


def check_compile_scope(args: "MinimalTrainingArguments") -> None:
    """Raise ValueError for an unknown scope of torch.compile, and for a scope without it."""
    scope = args.torch_compile_scope
    if scope not in ("model", "layer"):
        raise ValueError(f"torch_compile_scope={scope!r} cannot be used: choose 'model' or 'layer'.")
    if scope == "layer" and not args.torch_compile:
        raise ValueError("torch_compile_scope='layer' needs torch_compile=True: without it, nothing is compiled.")


def check_metrics(args: "BaseTrainingArguments") -> None:
    """Raise ValueError for unknown additions to metrics, and for an accumulation of no batches."""
    unknown = next((name for name in args.include_for_metrics if name not in METRIC_INPUTS), None)
    if unknown is not None:
        raise ValueError(
            f"include_for_metrics={args.include_for_metrics!r} cannot be used: {unknown!r} is unknown. Choose from "
            f"{', '.join(map(repr, METRIC_INPUTS))}."
        )
    steps = args.eval_accumulation_steps
    if steps is not None and steps < 1:
        raise ValueError(
            f"eval_accumulation_steps={steps} cannot be used: set a number of batches of 1 or more, or None to copy each batch "
            "to host memory at once."
        )


def check_best_model(args: "BaseTrainingArguments") -> None:
    """Raise ValueError for a best model without evaluations or without saves."""
    for name in ("load_best_model_at_end", "preserve_best_model"):
        if not getattr(args, name):
            continue
        if args.eval_strategy == "no" and not args.eval_on_save:
            raise ValueError(
                f"{name}=True cannot be combined with eval_strategy='no': choosing the best model needs evaluations. "
                "Set eval_strategy to 'steps' or 'epoch', or eval_on_save=True."
            )
        if args.save_strategy == "no":
            raise ValueError(
                f"{name}=True cannot be combined with save_strategy='no': the best model is one of the checkpoints. "
                "Set save_strategy to 'steps' or 'epoch'."
            )


def check_attention(args: "BaseTrainingArguments") -> None:
    """Raise ValueError for unknown SDPA backends, and for a priority order of fewer than two backends."""
    backends = [args.sdpa_backend] if isinstance(args.sdpa_backend, str) else args.sdpa_backend
    for name in backends or ():
        if name not in SDPA_BACKENDS:
            allowed = ", ".join(map(repr, SDPA_BACKENDS))
            raise ValueError(f"sdpa_backend={args.sdpa_backend!r} cannot be used: choose from {allowed}.")
    if backends is not None and not backends:
        raise ValueError("sdpa_backend=[] cannot be used: name at least one backend, or set it to None.")
    if args.sdpa_set_priority and len(backends or ()) < 2:
        raise ValueError(
            f"sdpa_set_priority=True needs a list of backends in order of priority, but sdpa_backend is "
            f"{args.sdpa_backend!r}. List at least two backends, or set sdpa_set_priority=False."
        )


def check_activation_budget(args: "TrainingArguments") -> None:
    """Raise ValueError for an activation memory budget outside [0, 1] or without torch.compile."""
    budget = args.activation_memory_budget
    if budget is None:
        return
    if not 0 <= budget <= 1:
        raise ValueError(
            f"activation_memory_budget={budget} cannot be used: it is the fraction of activations to keep, from 0 to 1."
        )
    if not args.torch_compile:
        raise ValueError(
            f"activation_memory_budget={budget} needs torch_compile=True: the budget is enforced by the compiler's "
            "partitioner."
        )


def check_average(args: "TrainingArguments") -> None:
    """Raise ValueError for an EMA decay out of range, and for an evaluation or best metric of an EMA that is not kept."""
    if args.ema_decay is not None and not 0 <= args.ema_decay < 1:
        raise ValueError(f"ema_decay={args.ema_decay!r} cannot be used: it must be at least 0 and less than 1.")
    if args.eval_ema and args.ema_decay is None:
        raise ValueError(
            "eval_ema=True evaluates the averaged weights, but ema_decay=None keeps no average. Set ema_decay (such as "
            "0.999), or eval_ema=False."
        )
    # The metric may be written with or without "eval_".
    if not args.eval_ema and args.best_model_metric.removeprefix("eval_") == "ema_loss":
        raise ValueError(
            f"metric_for_best_model={args.best_model_metric!r} is the loss of the averaged weights, which are not evaluated. "
            "Set eval_ema=True and ema_decay, or another metric."
        )


def check_param_precision(args: "TrainingArguments") -> None:
    """Raise ValueError for settings that contradict bfloat16 weights with float32 updates."""
    precision = args.param_precision
    if precision == "fp32":
        return
    if args.default_dtype is not None:
        raise ValueError(
            f"param_precision={precision!r} cannot be combined with default_dtype={args.default_dtype!r}: both set the dtype "
            "of the weights. Remove default_dtype: the model is built in its usual dtype, then converted to bfloat16."
        )
    if args.mixed_precision == "fp16":
        raise ValueError(
            f"param_precision={precision!r} cannot be combined with mixed_precision='fp16': bfloat16 weights and gradients "
            "have a larger range than float16, and would overflow in it. Use mixed_precision='bf16' or None."
        )


def refuse_fused_combinations(args: "TrainingArguments") -> None:
    """Raise ValueError for settings that need all gradients at once, if the optimizer steps in the backward pass."""
    if not args.fuse_optim_with_backward:
        return
    reasons = {
        # With 0, as with None, gradients are not clipped.
        "max_grad_norm": (bool(args.max_grad_norm), "parameters are updated before the total norm is known"),
        "gradient_accumulation_steps": (
            args.gradient_accumulation_steps > 1,
            "each gradient is applied and freed as soon as it is computed",
        ),
        "mixed_precision": (args.mixed_precision == "fp16", "GradScaler must see all gradients before an update"),
        "nonfinite_grad": (
            args.nonfinite_grad == "skip",
            "parameters are updated before all gradients are known to be finite",
        ),
    }
    for name, (refused, reason) in reasons.items():
        if refused:
            raise ValueError(
                f"fuse_optim_with_backward=True cannot be combined with {name}={getattr(args, name)!r}: {reason}. "
                f"Turn one of the two off."
            )


def refuse_short_weights(dtype: torch.dtype, where: str) -> None:
    """Raise ValueError for float16 weights, which mixed_precision="fp16" cannot train."""
    if dtype == torch.float16:
        raise ValueError(
            f"mixed_precision='fp16' cannot be combined with weights in float16 ({where}): unscaling float16 gradients "
            "loses precision. Keep the weights in float32, or train without mixed_precision."
        )


def check_shards(data_is_sharded: bool | None, dispatches_all: bool) -> None:
    """Raise ValueError for shards of ranks that never read data, because rank 0 reads everything."""
    if data_is_sharded and dispatches_all:
        raise ValueError(
            "data_is_sharded=True cannot be used: rank 0 reads for all ranks (dispatch_batches=True, or a single pipeline), so "
            "nobody would read the shards of the other ranks. Set dispatch_batches=False, or pass the full dataset and remove "
            "data_is_sharded."
        )
