"""Training arguments: plain dataclasses whose values are checked when they are made."""

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
"""Those of `transformers` that need no metric; importing it only to ask would take seconds."""


@dataclass(kw_only=True)
class ArgumentGroup(NamedArguments):
    """Arguments that belong together, a field of other arguments; a dict is accepted in its place."""

    def __post_init__(self) -> None:
        for name, hint in fields_with_types(type(self)).items():
            setattr(self, name, converted(name, getattr(self, name), hint))


@dataclass(kw_only=True)
class MinimalTrainingArguments(NamedArguments):
    """What every trainer understands, under the names of `transformers.TrainingArguments`."""

    output_dir: str = "tmp_trainer"
    logging_dir: str | None = None
    """None: `<output_dir>/runs/<time>_<host>`."""
    run_name: str | None = None
    """The name by which services such as Weights & Biases list the run."""
    per_device_train_batch_size: int = 16
    per_device_eval_batch_size: int = 16
    num_train_epochs: float = 1
    """May be a fraction; negative means no limit."""
    max_steps: int = -1
    """0 or more overrides num_train_epochs; epochs repeat as needed."""
    device: str | None = None
    seed: int = -1
    """Negative: a new one each time, which is then kept in the checkpoint."""
    use_cpu: bool = False
    epoch_train_steps: int = 100000
    """The length of an epoch that is assumed for a loader without one."""
    dataloader_num_workers: int = 0
    dataloader_pin_memory: bool = True
    dataloader_persistent_workers: bool = False
    dataloader_prefetch_factor: int | None = None
    """Batches per worker; None is 2 with workers."""
    dataloader_drop_last: bool = False
    eval_strategy: str = "no"
    eval_steps: int = 100
    eval_delay: int = 0
    """No evaluation before this step."""
    logging_strategy: str = "steps"
    logging_steps: int = 50
    logging_first_step: bool = False
    torch_compile: bool = False
    torch_compile_backend: str | None = None
    torch_compile_mode: str | None = "default"
    torch_compile_dynamic: bool = True
    torch_compile_full_graph: bool = False
    max_grad_norm: float | None = None
    """None or 0 measures the norm without clipping."""
    gradient_accumulation_steps: int = 1
    save_strategy: str = "steps"
    save_steps: int = 1000
    save_total_limit: int | None = 2
    save_safetensors: bool = True
    save_on_each_node: bool = False
    overwrite_output_dir: bool = False
    save_optimizer_state: bool = True
    """False leaves the optimizer out of checkpoints; the next three do the same for their components."""
    save_scheduler_state: bool = True
    save_dataset_state: bool = True
    save_rng_state: bool = True
    resume_from_checkpoint: bool | str = True
    """True: the newest complete checkpoint, if there is one; a path: that one; False: start fresh."""
    load_best_model_at_end: bool = False
    metric_for_best_model: str = "loss"
    greater_is_better: bool | None = None
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: Options | None = None
    """Options of the schedule; a text is read as JSON."""
    warmup_steps: int = 0
    learning_rate: float = 5e-5
    weight_decay: float = 0.0
    weight_decay_groups: str = "auto"
    """"auto": no weight decay on biases and norms; "all": on all parameters, as optimizers of torch do by themselves."""
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
            raise ValueError("num_train_epochs=nan cannot be used: give a number of epochs, negative for no limit.")
        if self.seed >= 2**63:
            raise ValueError(f"seed={self.seed} cannot be used: it must be less than 2**63; negative for a new one.")
        self._check_device()
        self._choose("lr_scheduler_type", _SCHEDULES)
        self._choose("weight_decay_groups", ["auto", "all"])
        if self.torch_compile_backend in (None, "inductor"):
            # Other compilers have modes of their own.
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
                f"use_cpu=True and device={self.device!r} contradict each other: leave device None, or use_cpu False."
            )
        if self.dataloader_num_workers == 0 and self.dataloader_prefetch_factor is not None:
            raise ValueError(
                f"dataloader_prefetch_factor={self.dataloader_prefetch_factor} needs workers: set dataloader_num_workers "
                "to 1 or more, or leave it None."
            )

    def copy(self: ArgumentsT) -> ArgumentsT:
        """An independent copy: trainers work on one, the caller's object is never changed."""
        return dataclasses.replace(copy.deepcopy(self))

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_json_string(self) -> str:
        """As JSON text, which Hugging Face callbacks write into their logs."""
        return json.dumps(self.to_dict(), indent=2, default=str)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """With numbers and text only, which loggers of hyperparameters accept."""
        kept = (bool, int, float, str)
        return {name: value if isinstance(value, kept) else str(value) for name, value in self.to_dict().items()}

    def _check_types(self) -> None:
        for name, hint in fields_with_types(type(self)).items():
            setattr(self, name, converted(name, getattr(self, name), hint))

    def _check_strategy(self, name: str) -> None:
        # YAML reads a plain `no` as False.
        value = "no" if getattr(self, name) is False else getattr(self, name)
        try:
            setattr(self, name, IntervalStrategy(getattr(value, "value", value)).value)
        except ValueError as error:
            raise ValueError(f"{name}={value!r}: {error}") from None

    def _require(self, name: str, least: float) -> None:
        value = getattr(self, name)
        # So that NaN is refused as well.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= least:
            raise ValueError(f"{name}={value!r} cannot be used: it must be a number of {least} or more.")

    def _check_device(self) -> None:
        if self.device is None:
            return
        try:
            torch.device(self.device)
        except RuntimeError:
            raise ValueError(
                f"device={self.device!r} cannot be used: give a device of torch, such as 'cuda', 'cuda:1' or 'cpu'."
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
    """Adds evaluation, the choice of the best checkpoint, and precision."""

    default_dtype: str | None = None
    """The dtype in which the model is built, such as "bfloat16"."""
    max_eval_steps: int = -1
    """Evaluate on so many batches only; negative means all."""
    preserve_best_model: bool = False
    best_model_metric: str = "loss"
    best_model_greater_is_better: bool | None = None
    preserve_n_best: int = 1
    eval_on_save: bool = False
    enable_activation_offloading: bool = False
    """Keep what the backward pass needs in the memory of the CPU instead of the accelerator's."""
    detect_anomaly: bool = False
    sdpa_backend: list[str] | str | None = None  # in this order: HfArgumentParser cannot read another
    """What may compute torch's scaled_dot_product_attention: "math", "flash", "efficient", "cudnn", or a list of these."""
    sdpa_set_priority: bool = False
    """Try those of the list in their order."""
    float32_matmul_precision: str | None = None
    dynamo_recompile_limit: int | None = None
    mixed_precision: str | None = None
    fp8_recipe: str | None = None
    """Linear layers in float8: "tensorwise", "rowwise" or "rowwise_with_gw_hp"."""
    fp8_dim_alignment: int = 16
    """Layers with a dimension that this does not divide stay as they are."""
    qat_recipe: str | None = None
    """Train for a later quantisation: "int8-dynamic-act-int4-weight", "int4-weight-only" or another of qat_recipes."""

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
                "max_eval_steps=0 cannot be used: an evaluation needs a batch. Give a number of batches, -1 for all of "
                "them, or turn evaluations off by eval_strategy='no'."
            )
        check_best_model(self)
        check_attention(self)
        if self.fp8_recipe is not None and self.qat_recipe is not None:
            raise ValueError(
                f"fp8_recipe={self.fp8_recipe!r} and qat_recipe={self.qat_recipe!r} exclude each other: both replace the "
                "model's linear layers. Set one of them to None."
            )
        self._choose("fp8_recipe", [None, *FP8_RECIPES])
        self._choose("qat_recipe", [None, *QAT_RECIPES])
        self._require("fp8_dim_alignment", 1)

    def _follow_aliases(self) -> None:
        """The names of `transformers` for the same two settings, unless ours were set; both must not contradict."""
        for ours, theirs, default in (
            ("best_model_metric", "metric_for_best_model", "loss"),
            ("best_model_greater_is_better", "greater_is_better", None),
        ):
            values = [getattr(self, name) for name in (ours, theirs)]
            plain = [value.removeprefix("eval_") if isinstance(value, str) else value for value in values]
            if default not in plain and plain[0] != plain[1]:
                raise ValueError(
                    f"{theirs}={values[1]!r} and {ours}={values[0]!r} contradict each other: they are two names of one "
                    f"setting, by which the best checkpoint is chosen. Leave {ours} out, or give both the same value."
                )
        if self.best_model_metric == "loss":
            self.best_model_metric = self.metric_for_best_model
        if self.best_model_greater_is_better is None:
            self.best_model_greater_is_better = self.greater_is_better

    def under_both_names(self: BaseArgumentsT) -> BaseArgumentsT:
        """A copy in which the two settings have their values under the names of `transformers` too, for its callbacks."""
        both = self.copy()
        both.metric_for_best_model = self.best_model_metric
        both.greater_is_better = self.best_model_greater_is_better
        if both.greater_is_better is None:
            both.greater_is_better = default_greater_is_better(self.best_model_metric)
        return both


@dataclass(kw_only=True)
class TrainingArguments(BaseTrainingArguments):
    """Adds what `Trainer` and the strategies built on it understand."""

    gc_threshold: float = 0.5
    """Empty the accelerator's cache when more than this share of its memory is reserved but unused."""
    construct_model_on: str = "default"
    checkpoint_components: list[str] | None = None
    skip_checkpoint_components: Names = field(default_factory=tuple)
    async_save: bool = False
    on_save_error: str = "raise"
    activation_memory_budget: float | None = None
    """The share of activations that compiled models keep for the backward pass, from 0 (recompute all) to 1."""
    fuse_optim_with_backward: bool = False
    """Update each parameter in the backward pass, as soon as its gradient is there, and let go of the gradient."""
    ema_decay: float | None = None
    """Keep an exponential moving average of the weights; each step it becomes decay x average + (1 - decay) x weights."""
    eval_ema: bool = False
    """Evaluate the averaged weights too, as eval_ema_loss."""
    speed_metrics_start_step: int = 1
    """Steps before this one are not timed: they compile and warm up."""
    set_dataset_epoch: bool = True
    debug_optimizer_groups: bool = False
    shuffle: bool = True
    token_weighted_loss: bool = True
    """The loss of a step is the mean over its target tokens; False: the mean of the micro-batches' means."""
    nonfinite_grad: str = "stop"
    """When gradients are NaN or infinite: "stop" raises NonFiniteError, "skip" leaves the update out, "ignore" trains on."""

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
    """An arguments object of the trainer's own, from the caller's object or a dict of values."""
    if isinstance(given, cls):
        return given.copy()
    if isinstance(given, MinimalTrainingArguments):
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in given.to_dict().items() if name in known})
    if not isinstance(given, Mapping):
        raise _foreign_arguments_error(cls, type(given))
    known_names = list(fields_with_types(cls))
    refuse_unknown(cls.__name__, [name for name in given if name not in known_names], known_names)
    return cls(**given)


def _foreign_arguments_error(cls: type, given: type) -> ValueError:
    """Both classes may have the same name: that of `transformers` is given by mistake most often."""
    return ValueError(
        f"args must be {cls.__module__}.{cls.__qualname__} or a dict of its fields, not "
        f"{given.__module__}.{given.__qualname__}. Most fields have the names of transformers.TrainingArguments: pass those "
        f"that you set as a dict, such as args={{'output_dir': ..., 'max_steps': ...}}, or as {cls.__name__}(...)."
    )
