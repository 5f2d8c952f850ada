"""InfoCallback: prints a summary of model, precision, devices, batch size and steps when training starts.

Rank 0 prints. It is one of the default callbacks.
"""

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.callbacks.display import format_count, planned_steps, show_row
from forgather.ml.trainer.trainer_types import TrainerCallback, TrainerControl, TrainerState
from forgather.ml.utils import class_of, count_parameters

_RECIPES = (
    "gradient_checkpointing",
    "torch_compile",
    "activation_memory_budget",
    "enable_activation_offloading",
    "fuse_optim_with_backward",
    "fp8_recipe",
    "qat_recipe",
    "ema_decay",
)


class InfoCallback(TrainerCallback):
    """Callback that prints model, precision, recipes, devices, batch size, steps, start and output directory."""

    changes_control = False

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module,
        trainer: object,
        **kwargs: object,
    ) -> None:
        if not state.is_world_process_zero:
            return
        whole_model = trainer.unwrapped_model() if hasattr(trainer, "unwrapped_model") else model
        rows = {
            "model": describe_model(whole_model, getattr(trainer, "pipeline", None)),
            "precision": describe_precision(args, whole_model),
            "recipes": describe_recipes(args),
            "devices": describe_devices(state, whole_model),
            "batch": describe_batch(args, state, trainer),
            "steps": describe_steps(state, args, trainer),
            "start": describe_start(state),
            "output": os.path.abspath(args.output_dir),
        }
        for label, text in rows.items():
            show_row(label, text)


def describe_model(model: nn.Module, pipeline: Any = None) -> str:
    """Return name and size of the model. For a pipeline, describe the full model."""
    stats = count_parameters(model) if pipeline is None else pipeline.parameter_stats
    name = class_of(model if pipeline is None else pipeline.whole).__name__
    parts = []
    if stats.trainable != stats.total:
        parts.append(f"{format_count(stats.trainable)} trainable")
    if stats.embedding:
        parts.append(f"{format_count(stats.non_embedding)} without embeddings")
    details = f" ({', '.join(parts)})" if parts else ""
    stages = "" if pipeline is None else f", in {pipeline.num_stages} stages on {len(pipeline.stage_indices)} ranks"
    return f"{name}, {format_count(stats.total)} parameters{details}{stages}"


def describe_precision(args: TrainingArguments, model: nn.Module) -> str:
    dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()})
    text = f"parameters in {' and '.join(dtypes) or 'no dtype'}"
    mixed = getattr(args, "mixed_precision", None)
    return text if mixed in (None, "no") else f"{text}, computed in {mixed}"


def describe_recipes(args: TrainingArguments) -> str:
    """Return the recipes in use, or an empty text."""
    values = {name: getattr(args, name, None) for name in _RECIPES}
    return ", ".join(
        name if value is True else f"{name}={value}" for name, value in values.items() if value not in (None, False)
    )


def describe_devices(state: TrainerState, model: nn.Module) -> str:
    num_processes = getattr(state, "num_processes", 1)
    types = sorted({parameter.device.type for parameter in model.parameters()}) or ["cpu"]
    names = " and ".join(_device_names(types))
    return f"{names}, {num_processes} process{'es' if num_processes > 1 else ''}"


def describe_batch(args: TrainingArguments, state: TrainerState, trainer: object) -> str:
    per_device = state.train_batch_size
    accumulation = args.gradient_accumulation_steps
    num_ranks = num_data_parallel_ranks(state, trainer)
    if args.global_batch_size is not None:
        share = f"at most {per_device} per device x {accumulation} accumulated x {num_ranks} data-parallel"
        return f"{args.global_batch_size} per step (global_batch_size), {share}"
    total = per_device * accumulation * num_ranks
    return f"{per_device} per device x {accumulation} accumulated x {num_ranks} data-parallel = {total} per step"


def describe_steps(state: TrainerState, args: TrainingArguments | None = None, trainer: object = None) -> str:
    """Return the number of steps and epochs. With max_steps, compute the epochs if the dataloader length is known."""
    total = planned_steps(state)
    if total is None:
        return "no limit"
    epochs = state.num_train_epochs
    if getattr(args, "max_steps", -1) >= 0:
        num_batches = getattr(getattr(trainer, "train_dataloader", None), "num_batches", None)
        epochs = total / getattr(state, "epoch_train_steps", 1) if num_batches is not None else 0
    return (
        f"{total:,}, {max(round(epochs, 2), 0.01):g} epoch{'' if epochs == 1 else 's'}" if epochs > 0 else f"{total:,}"
    )


def describe_start(state: TrainerState) -> str:
    if state.global_step == 0:
        return "from the beginning"
    seen = f", after {format_count(state.num_input_tokens_seen)} tokens" if state.num_input_tokens_seen else ""
    return f"resumed at step {state.global_step:,} (epoch {state.epoch:.2f}){seen}"


def num_data_parallel_ranks(state: TrainerState, trainer: object) -> int:
    """Return the number of ranks that train on different data. Stages of one pipeline count as one."""
    if hasattr(trainer, "num_data_parallel_ranks"):
        return int(trainer.num_data_parallel_ranks)
    return getattr(state, "num_processes", 1)


def _device_names(types: list[str]) -> Iterator[str]:
    for kind in types:
        if kind == "cpu":
            yield f"CPU with {torch.get_num_threads()} thread(s)"
        elif kind == "cuda":
            yield torch.cuda.get_device_name()
        else:
            yield kind
