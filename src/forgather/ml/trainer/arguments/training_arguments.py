"""Training arguments: plain dataclasses that convert and validate their values on creation.

Field names follow `transformers.TrainingArguments`. An invalid value raises ValueError in `__post_init__`, so an existing
object is always valid. Trainers work on a copy (`arguments_from`). `forgather train --help` shows the field
documentation, which it reads from the source of this file and of `minimal_arguments.py`.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from forgather.ml.checkpoint.background.memory_plan import checked_async_save_memory
from forgather.ml.checkpoint.retention import default_greater_is_better
from forgather.ml.construct import torch_dtype
from forgather.ml.quantization import FP8_RECIPES, QAT_RECIPES
from forgather.ml.trainer.arguments.checks import (
    PARAM_PRECISIONS,
    check_activation_budget,
    check_attention,
    check_average,
    check_best_model,
    check_metrics,
    check_param_precision,
    refuse_fused_combinations,
)
from forgather.ml.trainer.arguments.checks import SDPA_BACKENDS as SDPA_BACKENDS
from forgather.ml.trainer.arguments.checks import refuse_short_weights as refuse_short_weights
from forgather.ml.trainer.arguments.data_arguments import DataArguments
from forgather.ml.trainer.arguments.field_values import Names, fields_with_types, refuse_unknown
from forgather.ml.trainer.arguments.minimal_arguments import ArgumentGroup as ArgumentGroup
from forgather.ml.trainer.arguments.minimal_arguments import ArgumentsT as ArgumentsT
from forgather.ml.trainer.arguments.minimal_arguments import MinimalTrainingArguments as MinimalTrainingArguments
from forgather.ml.trainer.arguments.watch_arguments import WatchArguments
from forgather.ml.trainer.loop.nonfinite import ACTIONS

BaseArgumentsT = TypeVar("BaseArgumentsT", bound="BaseTrainingArguments")


@dataclass(kw_only=True)
class BaseTrainingArguments(DataArguments):
    """Arguments of evaluation, the best checkpoint, precision and quantisation, in addition to the minimal ones."""

    default_dtype: str | None = None
    """dtype of the model at construction, such as "bfloat16"."""

    # --- evaluation and best checkpoint

    max_eval_steps: int = -1
    """Maximum number of evaluation batches. Negative: all."""
    preserve_best_model: bool = False
    """Keep the best checkpoints besides the newest."""
    best_model_metric: str = "loss"
    """The same as metric_for_best_model."""
    best_model_greater_is_better: bool | None = None
    """The same as greater_is_better."""
    preserve_n_best: int = 1
    """Number of best checkpoints to keep."""
    eval_on_save: bool = False
    """Evaluate before every save."""
    eval_on_start: bool = False
    """Evaluate before the first step too."""
    prediction_loss_only: bool = False
    """Evaluations return the loss only: predictions are not collected, and compute_metrics is not called."""
    label_names: list[str] | None = None
    """Columns with labels, for compute_metrics. None: the label parameters of the model's forward."""
    include_for_metrics: list[str] = field(default_factory=list)
    """Pass more to compute_metrics: "inputs" (the main input of the model), "loss" (the mean loss of each batch)."""
    batch_eval_metrics: bool = False
    """Call compute_metrics for each batch, as compute_metrics(prediction, compute_result=...), and keep no predictions."""
    eval_accumulation_steps: int | None = None
    """Batches of predictions on the device before they are copied to host memory. None: each is copied at once."""

    # --- memory, attention, precision

    enable_activation_offloading: bool = False
    """Offload activations for the backward pass to CPU memory."""
    detect_anomaly: bool = False
    """Find the operation that produces a NaN (torch.autograd anomaly detection). Much slower."""
    sdpa_backend: list[str] | str | None = None  # HfArgumentParser supports this order of types only.
    """Backends of scaled_dot_product_attention: "math", "flash", "efficient", "cudnn", or a list of these."""
    sdpa_set_priority: bool = False
    """Try the backends in the order of the list."""
    float32_matmul_precision: str | None = None
    """"high" uses TF32 for float32 matrix products, "medium" bfloat16."""
    dynamo_recompile_limit: int | None = None
    """Number of recompilations of one function before it runs uncompiled."""
    mixed_precision: str | None = None
    """Autocast dtype: "bf16" or "fp16". None or "no": no autocast."""
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
        check_metrics(self)
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
    """Device of construction: "default" (CPU), "device", or "meta" without memory."""
    checkpoint_components: list[str] | None = None
    """Components to save and load. None: all."""
    skip_checkpoint_components: Names = field(default_factory=tuple)
    """Components that are not loaded from a checkpoint."""
    async_save: bool = False
    """Save in the background: training stops only while the state is copied to memory."""
    async_save_memory: str | float | None = None
    """Memory for that copy: bytes per rank ("4GiB") or a share of the node's free memory. None: at most a quarter."""
    on_save_error: str = "raise"
    """After a failed save: "raise" the error, or "warn" and continue training."""
    activation_memory_budget: float | None = None
    """Fraction of activations that compiled models keep for the backward pass, from 0 (recompute all) to 1."""
    fuse_optim_with_backward: bool = False
    """Update each parameter during the backward pass, as soon as its gradient is computed, and free the gradient."""
    param_precision: str = "fp32"
    """"bf16_master": bfloat16 weights, float32 copies in the optimizer. "bf16_stochastic": stochastic rounding."""
    ema_decay: float | None = None
    """Keep an EMA of the weights. Each step: average = decay x average + (1 - decay) x weights."""
    eval_ema: bool = False
    """Evaluate the EMA weights too, as eval_ema_loss."""
    speed_metrics_start_step: int = 1
    """First timed step. Earlier steps compile and warm up."""
    set_dataset_epoch: bool = True
    """Call set_epoch of the dataset or sampler at the beginning of each epoch."""
    debug_optimizer_groups: bool = False
    """Log the parameters of each optimizer group."""
    shuffle: bool = True
    """Shuffle the training data in every epoch."""
    token_weighted_loss: bool = True
    """True: the loss of a step is the mean over its target tokens. False: the mean of the micro-batch means."""
    nonfinite_grad: str = "stop"
    """On NaN or infinite gradients: "stop" raises NonFiniteError, "skip" skips the update, "ignore" continues."""
    health_check: bool = True
    """Test accelerators, their memory and their links before training. No effect on CPUs."""
    replica_check_steps: int = 0
    """Compare a sample of the parameters between replicas every N steps, without an additional message. 0: never."""
    tune_malloc: bool = True
    """Let glibc keep freed memory for the next step. Affects the full process. No effect on accelerators."""
    control_socket: bool = True
    """Accept requests of `forgather control` through `<output_dir>/.forgather.sock`, from this user only."""
    watch: WatchArguments = field(default_factory=WatchArguments)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._choose("construct_model_on", ["default", "meta", "device"])
        self._choose("on_save_error", ["raise", "warn"])
        self.async_save_memory = checked_async_save_memory(self.async_save_memory)
        self._choose("nonfinite_grad", ACTIONS)
        self._require("gc_threshold", 0)
        self._require("replica_check_steps", 0)
        self._choose("param_precision", PARAM_PRECISIONS)
        check_param_precision(self)
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
