"""Evaluation of checkpoints: the token-weighted loss of stored weights, measured on one device.

Checkpoints of every trainer are evaluated alike, and nothing is written. `forgather evaluate` prints the results.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from forgather.ml.checkpoint.manifest import CheckpointManifest, read_manifest
from forgather.ml.finalize import ModelInitT, load_model, resolve_checkpoint
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments, arguments_from
from forgather.ml.trainer.metrics.named_datasets import datasets_by_name
from forgather.ml.trainer.trainer import Trainer
from forgather.ml.trainer.trainer_types import BaseDataset

_PREFIX = "eval"
_PIPELINE_AXIS = "pipeline_parallel"
_ONLY_FOR_TRAINING: dict[str, Any] = {
    "ema_decay": None,
    "eval_ema": False,
    "torch_compile": False,
    "torch_compile_scope": "model",
    "activation_memory_budget": None,
    "construct_model_on": "default",
    "fuse_optim_with_backward": False,
    "gradient_checkpointing": False,
    "global_batch_size": None,
    "replica_check_steps": 0,
    "resume_from_checkpoint": False,
}
"""Neutral values of arguments that only training needs."""


@dataclass(frozen=True)
class CheckpointEvaluation:
    """Result of the evaluation of one checkpoint."""

    checkpoint: str
    step: int | None
    averaged: bool
    """Whether the EMA weights were evaluated."""
    loss: float
    """Mean loss per target token; over all datasets, if there are several. NaN without targets."""
    num_tokens: int
    """Number of target tokens."""
    num_samples: int
    seconds: float
    """Duration of the evaluation, without the time to load the model."""
    metrics: dict[str, Any]
    """All metrics under the trainer's names, such as `eval_loss`, with the results of `compute_metrics`."""

    @property
    def perplexity(self) -> float:
        """Exponential of the loss; infinite if it is too large for a float."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


def evaluate_checkpoint(
    path: str,
    eval_dataset: BaseDataset,
    *,
    args: TrainingArguments | None = None,
    model_init: ModelInitT | None = None,
    ema: bool = False,
    **trainer_options: Any,
) -> CheckpointEvaluation:
    """Evaluate a checkpoint, or the newest complete one of an output directory, on one device.

    The loss equals the loss that the run's own evaluation computes at that step, up to the order of float additions.
    `args` are the arguments of the run, of any trainer. `model_init` builds the model if it is not a transformers model.
    `ema=True` evaluates the averaged weights. `trainer_options` are keywords of `Trainer`, such as `processing_class`,
    `data_collator`, `compute_loss_func` and `compute_metrics`. A dict of datasets is evaluated one by one. Nothing is
    written and no lock is taken, so that a training run may continue meanwhile.
    """
    checkpoint = resolve_checkpoint(path)
    manifest = read_manifest(checkpoint)
    chosen = single_device_arguments(args or TrainingArguments())
    if chosen.max_eval_steps > 0:
        # The limit counts the batches of each rank.
        chosen.max_eval_steps *= num_data_parallel_ranks(manifest)

    def build() -> nn.Module:
        return load_model(checkpoint, model_init, ema)

    trainer = evaluating_trainer(chosen, eval_dataset, model_init=build, **trainer_options)
    measured = _measure(trainer, eval_dataset)
    return CheckpointEvaluation(checkpoint, manifest.step, ema, **measured)


def evaluating_trainer(args: TrainingArguments, dataset: BaseDataset, **options: Any) -> Trainer[Any]:
    """Return a trainer for evaluations only: no console output, and nothing is written."""
    return Trainer(args=args, eval_dataset=dataset, default_callbacks=False, **options)


def single_device_arguments(args: TrainingArguments, **changes: Any) -> TrainingArguments:
    """Return the arguments of a run for an evaluation on one device, with changes."""
    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    values = {name: value for name, value in args.to_dict().items() if name in known}
    if getattr(args, "compute_dtype", None) == "bfloat16":
        # FSDP2 has its own setting for compute in bfloat16.
        values["mixed_precision"] = "bf16"
    return arguments_from(TrainingArguments, values | _ONLY_FOR_TRAINING | changes)


def num_data_parallel_ranks(manifest: CheckpointManifest) -> int:
    """Return how many ranks of the job that saved a checkpoint had batches of their own."""
    mesh = manifest.mesh or {}
    names, shape = mesh.get("axis_names"), mesh.get("shape")
    # The manifest is data from a file, and its schema leaves these values open.
    if not isinstance(names, list) or not isinstance(shape, list) or _PIPELINE_AXIS not in names:
        return manifest.world_size
    num_stages = shape[names.index(_PIPELINE_AXIS)] if len(shape) == len(names) else None
    return max(manifest.world_size // num_stages, 1) if isinstance(num_stages, int) and num_stages > 0 else 1


def _measure(trainer: Trainer[Any], dataset: BaseDataset) -> dict[str, Any]:
    """Evaluate a dataset, or each dataset of a dict; returns fields of `CheckpointEvaluation`."""
    named = datasets_by_name(dataset)
    datasets = {_PREFIX: dataset} if named is None else {f"{_PREFIX}_{name}": one for name, one in named.items()}
    metrics: dict[str, Any] = {}
    num_samples = 0
    for prefix, one in datasets.items():
        metrics |= trainer.evaluate(one, metric_key_prefix=prefix)
        num_samples += trainer.evaluator.num_samples
    seconds = sum(metrics.pop(f"{prefix}_runtime") for prefix in datasets)
    for prefix in datasets:
        del metrics[f"{prefix}_samples_per_second"]
    losses = [(float(metrics[f"{prefix}_loss"]), int(metrics[f"{prefix}_tokens"])) for prefix in datasets]
    return {
        "loss": _mean_loss(losses),
        "num_tokens": sum(tokens for _, tokens in losses),
        "num_samples": num_samples,
        "seconds": seconds,
        "metrics": metrics,
    }


def _mean_loss(losses: Sequence[tuple[float, int]]) -> float:
    """Return the mean over all tokens of datasets, from the loss and the number of tokens of each."""
    if len(losses) == 1:
        # Unchanged: multiplying and dividing by the number of tokens could change the last bit.
        return losses[0][0]
    num_tokens = sum(tokens for _, tokens in losses)
    return sum(loss * tokens for loss, tokens in losses if tokens) / num_tokens if num_tokens else math.nan
