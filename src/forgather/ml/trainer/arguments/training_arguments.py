"""Training arguments: plain dataclasses that convert and validate their values on creation.

Field names follow `transformers.TrainingArguments`. An invalid value raises ValueError in `__post_init__`, so an existing
object is always valid. Trainers work on a copy (`arguments_from`). `forgather train --help` shows the field
documentation, which it reads from the source of this file.
"""

import copy
import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from forgather.ml.checkpoint.retention import default_greater_is_better
from forgather.ml.construct import torch_dtype
from forgather.ml.quantization import FP8_RECIPES, QAT_RECIPES
from forgather.ml.trainer.arguments.checks import SDPA_BACKENDS as SDPA_BACKENDS
from forgather.ml.trainer.arguments.checks import (
    check_activation_budget,
    check_attention,
    check_average,
    check_best_model,
    refuse_fused_combinations,
)
from forgather.ml.trainer.arguments.checks import refuse_short_weights as refuse_short_weights
from forgather.ml.trainer.arguments.field_values import (
    NamedArguments,
    Names,
    Options,
    converted,
    fields_with_types,
    mapping_in,
    refuse_unknown,
)
from forgather.ml.trainer.loop.nonfinite import ACTIONS
from forgather.ml.trainer.trainer_types import IntervalStrategy

ArgumentsT = TypeVar("ArgumentsT", bound="MinimalTrainingArguments")
BaseArgumentsT = TypeVar("BaseArgumentsT", bound="BaseTrainingArguments")

_COMPILE_MODES = [None, "default", "lite", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
_WEIGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
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


@dataclass(kw_only=True)
class MinimalTrainingArguments(NamedArguments):
    """Arguments of every trainer, named as in `transformers.TrainingArguments`."""

    # --- output

    output_dir: str = "tmp_trainer"
    logging_dir: str | None = None
    """Directory of log files. None: `<output_dir>/runs/<time>_<host>`."""
    run_name: str | None = None
    """Name of the run in services such as Weights & Biases."""

    # --- length, device, seed

    per_device_train_batch_size: int = 16
    per_device_eval_batch_size: int = 16
    num_train_epochs: float = 1
    """Number of epochs, may be a fraction. Negative: no limit."""
    max_steps: int = -1
    """Number of optimizer steps. 0 or more overrides num_train_epochs; epochs repeat as needed."""
    device: str | None = None
    seed: int = -1
    """Random seed. Negative: a new seed for each run, which checkpoints keep."""
    use_cpu: bool = False
    epoch_train_steps: int = 100000
    """Assumed steps per epoch if the training data have no length."""

    # --- data loading

    dataloader_num_workers: int = 0
    dataloader_pin_memory: bool = True
    dataloader_persistent_workers: bool = False
    dataloader_prefetch_factor: int | None = None
    """Batches prefetched by each worker. None: 2 with workers."""
    dataloader_drop_last: bool = False

    # --- evaluation and logging

    eval_strategy: str = "no"
    eval_steps: int = 100
    eval_delay: int = 0
    """Skip evaluations before this step."""
    logging_strategy: str = "steps"
    logging_steps: int = 50
    logging_first_step: bool = False

    # --- compilation and gradients

    torch_compile: bool = False
    torch_compile_backend: str | None = None
    torch_compile_mode: str | None = "default"
    torch_compile_dynamic: bool = True
    torch_compile_full_graph: bool = False
    max_grad_norm: float | None = None
    """Maximum gradient norm for clipping. None or 0: the norm is measured, but not clipped."""
    gradient_accumulation_steps: int = 1

    # --- checkpoints

    save_strategy: str = "steps"
    save_steps: int = 1000
    save_total_limit: int | None = 2
    save_safetensors: bool = True
    save_on_each_node: bool = False
    overwrite_output_dir: bool = False
    save_optimizer_state: bool = True
    """False omits the optimizer from checkpoints. The next three arguments do the same for their components."""
    save_scheduler_state: bool = True
    save_dataset_state: bool = True
    save_rng_state: bool = True
    resume_from_checkpoint: bool | str = True
    """True: resume from the newest complete checkpoint, if any. A path: resume from it. False: start fresh."""
    load_best_model_at_end: bool = False
    metric_for_best_model: str = "loss"
    greater_is_better: bool | None = None

    # --- optimizer and schedule

    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: Options | None = None
    """Options of the schedule; text is parsed as JSON."""
    warmup_steps: int = 0
    learning_rate: float = 5e-5
    weight_decay: float = 0.0
    weight_decay_groups: str = "auto"
    """"auto": no weight decay on biases and norms. "all": weight decay on all parameters, the default of torch."""
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    gradient_checkpointing: bool = False

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
        for name in ("eval_steps", "logging_steps", "save_steps", "epoch_train_steps"):
            self._require(name, 1)
        for name in ("dataloader_num_workers", "eval_delay", "warmup_steps", "learning_rate", "weight_decay"):
            self._require(name, 0)
        self._require("adam_epsilon", 0)
        if math.isnan(self.num_train_epochs):
            raise ValueError("num_train_epochs=nan cannot be used: set a number of epochs, or -1 for no limit.")
        if self.seed >= 2**63:
            raise ValueError(f"seed={self.seed} cannot be used: it must be less than 2**63. -1 chooses a new seed.")
        self._check_device()
        self._choose("lr_scheduler_type", _SCHEDULES)
        self._choose("weight_decay_groups", ["auto", "all"])
        if self.torch_compile_backend in (None, "inductor"):
            # Other compiler backends have different modes.
            self._choose("torch_compile_mode", _COMPILE_MODES)
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
            setattr(self, name, converted(name, getattr(self, name), hint))

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


@dataclass(kw_only=True)
class BaseTrainingArguments(MinimalTrainingArguments):
    """Arguments of evaluation, the best checkpoint, precision and quantisation, in addition to the minimal ones."""

    default_dtype: str | None = None
    """dtype of the model at construction, such as "bfloat16"."""

    # --- evaluation and best checkpoint

    max_eval_steps: int = -1
    """Maximum number of evaluation batches. Negative: all."""
    preserve_best_model: bool = False
    best_model_metric: str = "loss"
    best_model_greater_is_better: bool | None = None
    preserve_n_best: int = 1
    eval_on_save: bool = False

    # --- memory, attention, precision

    enable_activation_offloading: bool = False
    """Offload activations for the backward pass to CPU memory."""
    detect_anomaly: bool = False
    sdpa_backend: list[str] | str | None = None  # HfArgumentParser supports this order of types only.
    """Backends of scaled_dot_product_attention: "math", "flash", "efficient", "cudnn", or a list of these."""
    sdpa_set_priority: bool = False
    """Try the backends in the order of the list."""
    float32_matmul_precision: str | None = None
    dynamo_recompile_limit: int | None = None
    mixed_precision: str | None = None
    fp8_recipe: str | None = None
    """Float8 training of linear layers: "tensorwise", "rowwise" or "rowwise_with_gw_hp"."""
    fp8_dim_alignment: int = 16
    """Layers with a dimension that is not a multiple of this number are not converted to float8."""
    qat_recipe: str | None = None
    """Quantisation-aware training, such as "int8-dynamic-act-int4-weight" or "int4-weight-only"."""

    def __post_init__(self) -> None:
        if isinstance(self.default_dtype, torch.dtype):
            self.default_dtype = str(self.default_dtype)
        super().__post_init__()
        self._follow_aliases()
        if self.default_dtype is not None:
            self._check_dtype("default_dtype")
        self._choose("mixed_precision", [None, "no", "bf16", "fp16"])
        if self.mixed_precision == "fp16" and self.default_dtype is not None:
            refuse_short_weights(torch_dtype(self.default_dtype), "default_dtype")
        self._choose("float32_matmul_precision", [None, "highest", "high", "medium"])
        self._require("preserve_n_best", 1)
        if self.dynamo_recompile_limit is not None:
            self._require("dynamo_recompile_limit", 1)
        if self.max_eval_steps == 0:
            raise ValueError(
                "max_eval_steps=0 cannot be used: an evaluation needs at least one batch. Set a number of batches, -1 for "
                "all, or disable evaluations with eval_strategy='no'."
            )
        check_best_model(self)
        check_attention(self)
        if self.fp8_recipe is not None and self.qat_recipe is not None:
            raise ValueError(
                f"fp8_recipe={self.fp8_recipe!r} cannot be combined with qat_recipe={self.qat_recipe!r}: both replace the "
                "model's linear layers. Set one of them to None."
            )
        self._choose("fp8_recipe", [None, *FP8_RECIPES])
        self._choose("qat_recipe", [None, *QAT_RECIPES])
        self._require("fp8_dim_alignment", 1)

    def _follow_aliases(self) -> None:
        """Copy the values from the argument names of `transformers`, unless Forgather's names are set.

        Raise ValueError if both names are set to different values.
        """
        for ours, theirs, default in (
            ("best_model_metric", "metric_for_best_model", "loss"),
            ("best_model_greater_is_better", "greater_is_better", None),
        ):
            values = [getattr(self, name) for name in (ours, theirs)]
            # A metric may be written with or without "eval_", so "eval_loss" does not contradict "loss".
            plain = [value.removeprefix("eval_") if isinstance(value, str) else value for value in values]
            if default not in plain and plain[0] != plain[1]:
                raise ValueError(
                    f"{theirs}={values[1]!r} and {ours}={values[0]!r} contradict each other: both names set how the best "
                    f"checkpoint is chosen. Omit {ours}, or set both to the same value."
                )
        if self.best_model_metric == "loss":
            self.best_model_metric = self.metric_for_best_model
        if self.best_model_greater_is_better is None:
            self.best_model_greater_is_better = self.greater_is_better

    def under_both_names(self: BaseArgumentsT) -> BaseArgumentsT:
        """Return a copy with the best-model settings also under the names that callbacks of `transformers` read."""
        both = self.copy()
        both.metric_for_best_model = self.best_model_metric
        both.greater_is_better = self.best_model_greater_is_better
        if both.greater_is_better is None:
            # Callbacks such as early stopping need a direction.
            both.greater_is_better = default_greater_is_better(self.best_model_metric)
        return both


@dataclass(kw_only=True)
class TrainingArguments(BaseTrainingArguments):
    """Arguments of `Trainer` and all strategies, in addition to the base arguments."""

    gc_threshold: float = 0.5
    """Empty the accelerator's cache if more than this fraction of its memory is reserved but unused."""
    construct_model_on: str = "default"
    checkpoint_components: list[str] | None = None
    skip_checkpoint_components: Names = field(default_factory=tuple)
    async_save: bool = False
    on_save_error: str = "raise"
    activation_memory_budget: float | None = None
    """Fraction of activations that compiled models keep for the backward pass, from 0 (recompute all) to 1."""
    fuse_optim_with_backward: bool = False
    """Update each parameter during the backward pass, as soon as its gradient is computed, and free the gradient."""
    ema_decay: float | None = None
    """Keep an EMA of the weights. Each step: average = decay x average + (1 - decay) x weights."""
    eval_ema: bool = False
    """Evaluate the EMA weights too, as eval_ema_loss."""
    speed_metrics_start_step: int = 1
    """First timed step. Earlier steps compile and warm up."""
    set_dataset_epoch: bool = True
    debug_optimizer_groups: bool = False
    shuffle: bool = True
    token_weighted_loss: bool = True
    """True: the loss of a step is the mean over its target tokens. False: the mean of the micro-batch means."""
    nonfinite_grad: str = "stop"
    """On NaN or infinite gradients: "stop" raises NonFiniteError, "skip" skips the update, "ignore" continues."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._choose("construct_model_on", ["default", "meta", "device"])
        self._choose("on_save_error", ["raise", "warn"])
        self._choose("nonfinite_grad", ACTIONS)
        self._require("gc_threshold", 0)
        refuse_fused_combinations(self)
        check_activation_budget(self)
        check_average(self)


def arguments_from(cls: type[ArgumentsT], given: "ArgumentsT | Mapping[str, Any]") -> ArgumentsT:
    """Return a separate arguments object for a trainer, from the caller's object or a dict of values."""
    if isinstance(given, cls):
        return given.copy()
    if isinstance(given, MinimalTrainingArguments):
        # Arguments of another strategy: keep the fields that this class has too.
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in given.to_dict().items() if name in known})
    if not isinstance(given, Mapping):
        raise _foreign_arguments_error(cls, type(given))
    known_names = list(fields_with_types(cls))
    refuse_unknown(cls.__name__, [name for name in given if name not in known_names], known_names)
    return cls(**given)


def _foreign_arguments_error(cls: type, given: type) -> ValueError:
    """Return the error for an object of an unknown class, most often `transformers.TrainingArguments`."""
    # Both classes may be called TrainingArguments, so the message contains the modules.
    return ValueError(
        f"args must be {cls.__module__}.{cls.__qualname__} or a dict of its fields, not "
        f"{given.__module__}.{given.__qualname__}. Most fields have the same names as in transformers.TrainingArguments: "
        f"pass your settings as a dict, such as args={{'output_dir': ..., 'max_steps': ...}}, or as {cls.__name__}(...)."
    )
