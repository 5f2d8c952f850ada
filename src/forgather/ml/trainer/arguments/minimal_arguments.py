"""Minimal training arguments: output, length, data loading, schedules of logs and saves, optimizer.

Every trainer has them. An invalid value raises ValueError in `__post_init__`, so an existing object is always valid.
`training_arguments.py` extends them. `forgather train --help` reads the field documentation from this source.
"""

import copy
import dataclasses
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from forgather.ml.construct import torch_dtype
from forgather.ml.trainer.arguments.checks import check_checkpointing, check_compile_scope, check_length
from forgather.ml.trainer.arguments.field_values import (
    Checkpointing,
    NamedArguments,
    Options,
    check_size,
    converted,
    fields_with_types,
    mapping_in,
)
from forgather.ml.trainer.trainer_types import IntervalStrategy

ArgumentsT = TypeVar("ArgumentsT", bound="MinimalTrainingArguments")

_COMPILE_MODES = [None, "default", "lite", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
_WEIGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ELASTIC_CHOICES = ("shrink-data-parallel", "fail")
_SCHEDULES = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
)
"""Schedules of `transformers` that need no metric. Listed here, because importing transformers takes seconds."""


@dataclass(kw_only=True)
class ArgumentGroup(NamedArguments):
    """Group of related arguments, used as a field of other arguments; a dict is accepted too."""

    def __post_init__(self) -> None:
        for name, hint in fields_with_types(type(self)).items():
            setattr(self, name, converted(name, getattr(self, name), hint))
            check_size(name, getattr(self, name))


@dataclass(kw_only=True)
class MinimalTrainingArguments(NamedArguments):
    """Arguments of every trainer, named as in `transformers.TrainingArguments`."""

    # --- output

    output_dir: str = "tmp_trainer"
    """Directory of checkpoints, logs and the stored configuration."""
    logging_dir: str | None = None
    """Directory of log files. None: `<output_dir>/runs/<time>_<host>`."""
    run_name: str | None = None
    """Name of the run in services such as Weights & Biases."""

    # --- length, device, seed

    per_device_train_batch_size: int = 16
    """Samples per rank in one forward pass."""
    per_device_eval_batch_size: int = 16
    """Samples per rank in one evaluation batch."""
    num_train_epochs: float = 1
    """Number of epochs above 0, may be a fraction. -1: no limit."""
    max_steps: int = -1
    """Number of optimizer steps. 0 or more overrides num_train_epochs; epochs repeat as needed. -1: by epochs."""
    device: str | None = None
    """Torch device, such as "cuda", "cuda:1" or "cpu". None: the accelerator, else the CPU."""
    seed: int = -1
    """Random seed. Negative: a new seed for each run, which checkpoints keep."""
    use_cpu: bool = False
    """Train on the CPU, even if an accelerator is available."""
    epoch_train_steps: int = 100000
    """Assumed steps per epoch if the training data have no length."""

    # --- data loading

    dataloader_num_workers: int = 0
    """Worker processes that load data. 0: load in the training process."""
    dataloader_pin_memory: bool = True
    """Copy batches to page-locked memory, for asynchronous transfers to accelerators."""
    dataloader_persistent_workers: bool = False
    """Keep workers between epochs."""
    dataloader_prefetch_factor: int | None = None
    """Batches prefetched by each worker. None: 2 with workers."""
    dataloader_drop_last: bool = False
    """Drop an incomplete last batch."""

    # --- evaluation and logging

    eval_strategy: str = "no"
    """When to evaluate."""
    eval_steps: int = 100
    """Steps between evaluations, with eval_strategy="steps"."""
    eval_delay: int = 0
    """Skip evaluations before this step."""
    logging_strategy: str = "steps"
    """When to log."""
    logging_steps: int = 50
    """Steps between logs, with logging_strategy="steps"."""
    logging_first_step: bool = False
    """Log the first step too."""

    # --- compilation and gradients

    torch_compile: bool = False
    """Compile the model."""
    torch_compile_backend: str | None = None
    """Compiler backend. None: inductor."""
    torch_compile_mode: str | None = "default"
    """Compiler mode of inductor."""
    torch_compile_dynamic: bool | None = True
    """Compile for dynamic shapes. None: torch decides after the first change of shape."""
    torch_compile_full_graph: bool = False
    """Raise an error at graph breaks."""
    torch_compile_scope: str = "model"
    """"model" compiles the model, or each pipeline stage, as a whole. "layer" compiles its layers, in much less time."""
    max_grad_norm: float | None = None
    """Maximum gradient norm for clipping. None or 0: the norm is measured, but not clipped."""
    gradient_accumulation_steps: int = 1
    """Micro-batches per optimizer step."""
    global_batch_size: int | None = None
    """Samples per optimizer step on all ranks together, whatever their number. Micro-batches per step follow from it, and
    per_device_train_batch_size is their upper bound. None: per_device_train_batch_size x ranks x accumulation."""
    elastic: str = "shrink-data-parallel"
    """Job of --nnodes MIN:MAX with a number of ranks that does not fit the layout: "shrink-data-parallel" trains with fewer
    pipelines or replicas, and surplus ranks wait as spares. "fail" ends the job."""

    # --- checkpoints

    save_strategy: str = "steps"
    """When to save checkpoints."""
    save_steps: int = 1000
    """Steps between checkpoints, with save_strategy="steps"."""
    save_total_limit: int | None = 2
    """Number of newest checkpoints to keep, 1 or more. None: all."""
    checkpoint_layout: str = "checkpoints"
    """"checkpoints": `<output_dir>/checkpoints/checkpoint-N`. "output_dir": `<output_dir>/checkpoint-N` with a
    trainer_state.json, where transformers and its tools look for checkpoints."""
    save_safetensors: bool = True
    """Store weights as safetensors. False: as torch archives."""
    save_on_each_node: bool = False
    """Each node writes to its own directory; for nodes without a shared file system."""
    overwrite_output_dir: bool = False
    """No effect: runs resume or move older checkpoints aside, and save_model overwrites the model."""
    save_optimizer_state: bool = True
    """False omits the optimizer from checkpoints. The next three arguments do the same for their components."""
    save_scheduler_state: bool = True
    save_dataset_state: bool = True
    save_rng_state: bool = True
    resume_from_checkpoint: bool | str = True
    """True: resume from the newest complete checkpoint, if any. A path: resume from it. False: start fresh."""
    load_best_model_at_end: bool = False
    """Load the weights of the best checkpoint after training."""
    metric_for_best_model: str = "loss"
    """Evaluation metric that selects the best checkpoint."""
    greater_is_better: bool | None = None
    """Whether a greater metric is better. None: decided by the name of the metric."""

    # --- optimizer and schedule

    lr_scheduler_type: str = "linear"
    """Learning-rate schedule, by the names of transformers."""
    lr_scheduler_kwargs: Options | None = None
    """Options of the schedule; text is parsed as JSON."""
    warmup_steps: int = 0
    """Steps of learning-rate warm-up."""
    learning_rate: float = 5e-5
    """Learning rate of AdamW after warm-up."""
    weight_decay: float = 0.0
    """Weight decay of AdamW."""
    weight_decay_groups: str = "auto"
    """"auto": no weight decay on biases and norms. "all": weight decay on all parameters, the default of torch."""
    adam_beta1: float = 0.9
    """Decay rate of the first moment."""
    adam_beta2: float = 0.999
    """Decay rate of the second moment."""
    adam_epsilon: float = 1e-8
    """Epsilon in the denominator of AdamW."""
    gradient_checkpointing: Checkpointing = field(default=False, metadata={"nargs": "?", "const": True})
    """Recompute activations in backward: True or "full", "selective" (keeps attention and narrow products), or a function."""

    def __post_init__(self) -> None:
        for name in ("output_dir", "logging_dir", "resume_from_checkpoint"):
            if isinstance(getattr(self, name), os.PathLike):
                setattr(self, name, os.fspath(getattr(self, name)))
        if isinstance(self.device, torch.device):
            self.device = str(self.device)
        for name in ("eval_strategy", "logging_strategy", "save_strategy"):
            self._check_strategy(name)
        # After paths, devices and strategies, which accept more types than their fields declare.
        self._check_types()
        if isinstance(self.lr_scheduler_kwargs, str):
            self.lr_scheduler_kwargs = mapping_in("lr_scheduler_kwargs", self.lr_scheduler_kwargs)
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
            self._require(name, 1)
        if self.global_batch_size is not None:
            self._require("global_batch_size", 1)
        self._choose("elastic", ELASTIC_CHOICES)
        self._choose("checkpoint_layout", ["checkpoints", "output_dir"])
        for name in ("eval_steps", "logging_steps", "save_steps", "epoch_train_steps"):
            self._require(name, 1)
        for name in ("dataloader_num_workers", "eval_delay", "warmup_steps", "learning_rate", "weight_decay"):
            self._require(name, 0)
        self._require("adam_epsilon", 0)
        check_length(self)
        if self.save_total_limit is not None and self.save_total_limit < 1:
            raise ValueError(
                f"save_total_limit={self.save_total_limit} cannot be used: set the number of newest checkpoints to keep, 1 or "
                "more. None keeps all."
            )
        self._check_device()
        self._choose("lr_scheduler_type", _SCHEDULES)
        self._choose("weight_decay_groups", ["auto", "all"])
        if self.torch_compile_backend in (None, "inductor"):
            # Other compiler backends have different modes.
            self._choose("torch_compile_mode", _COMPILE_MODES)
        check_checkpointing(self)
        check_compile_scope(self)
        if self.max_grad_norm is not None:
            self._require("max_grad_norm", 0)
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} cannot be used: it must be at least 0 and less than 1."
                )
        if self.use_cpu and self.device is not None and self.device.split(":")[0] != "cpu":
            raise ValueError(
                f"use_cpu=True cannot be combined with device={self.device!r}. Set device=None or use_cpu=False."
            )
        if self.dataloader_num_workers == 0 and self.dataloader_prefetch_factor is not None:
            raise ValueError(
                f"dataloader_prefetch_factor={self.dataloader_prefetch_factor} needs workers. Set dataloader_num_workers "
                "to 1 or more, or leave dataloader_prefetch_factor=None."
            )

    def copy(self: ArgumentsT) -> ArgumentsT:
        """Return an independent copy; trainers work on a copy and never change the caller's object."""
        # `replace` runs `__post_init__` again, which validates values that were assigned since the creation.
        return dataclasses.replace(copy.deepcopy(self))

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_json_string(self) -> str:
        """Return the arguments as JSON, which Hugging Face callbacks log."""
        return json.dumps(self.to_dict(), indent=2, default=str)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Return the arguments with values that hyperparameter loggers accept: bool, int, float and str."""
        kept = (bool, int, float, str)
        return {name: value if isinstance(value, kept) else str(value) for name, value in self.to_dict().items()}

    def _check_types(self) -> None:
        for name, hint in fields_with_types(type(self)).items():
            value = converted(name, getattr(self, name), hint)
            setattr(self, name, value)
            check_size(name, value)
            # An infinite norm clips nothing.
            if isinstance(value, float) and math.isinf(value) and name not in ("num_train_epochs", "max_grad_norm"):
                raise ValueError(f"{name}={value} cannot be used: set a finite number.")

    def _check_strategy(self, name: str) -> None:
        # YAML parses a plain `no` as False.
        value = "no" if getattr(self, name) is False else getattr(self, name)
        try:
            setattr(self, name, IntervalStrategy(getattr(value, "value", value)).value)
        except ValueError as error:
            raise ValueError(f"{name}={value!r}: {error}") from None

    def _require(self, name: str, least: float) -> None:
        value = getattr(self, name)
        # `not value >= least` instead of `value < least` rejects NaN too.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= least:
            raise ValueError(f"{name}={value!r} cannot be used: it must be a number of {least} or more.")

    def _check_device(self) -> None:
        if self.device is None:
            return
        try:
            torch.device(self.device)
        except RuntimeError:
            raise ValueError(
                f"device={self.device!r} cannot be used: set a torch device, such as 'cuda', 'cuda:1' or 'cpu'."
            ) from None

    def _check_dtype(self, name: str) -> None:
        try:
            dtype = torch_dtype(getattr(self, name))
        except ValueError as error:
            raise ValueError(f"{name}={getattr(self, name)!r} cannot be used: {error}") from None
        if dtype not in _WEIGHT_DTYPES:
            raise ValueError(
                f"{name}={getattr(self, name)!r} cannot be used: weights need a floating point dtype of 16 bits or more."
            )

    def _choose(self, name: str, choices: Sequence[Any]) -> None:
        if getattr(self, name) not in choices:
            allowed = ", ".join(repr(choice) for choice in choices)
            raise ValueError(f"{name}={getattr(self, name)!r} cannot be used: choose one of {allowed}.")
