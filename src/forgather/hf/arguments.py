"""TrainingArguments of transformers with additional fields, which have the prefix `fg_`.

The classes are subclasses, so HfArgumentParser, enumerations, fractions and defaults work as in transformers. The
process group is created by Forgather first; transformers and accelerate then use it. `Trainer` takes these arguments.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
import transformers

from forgather._extras import MissingPackageError, is_installed, missing_message
from forgather.hf.fields.other_settings import from_environment
from forgather.ml.distributed import DistributedEnvironment, get_world_size

STRATEGIES = ("auto", "single", "ddp", "fsdp2", "pipeline", "hybrid", "accelerate")
_TIMEOUT_OF_TRANSFORMERS = 1800


def _help(text: str) -> dict[str, str]:
    return {"help": text}


@dataclass
class ForgatherFields:
    """Fields that both argument classes add to the fields of transformers."""

    fg_strategy: str = field(
        default="auto",
        metadata=_help(
            f"Parallel strategy: {', '.join(STRATEGIES)}. auto: fsdp2 with fsdp, ddp with a launcher, else single."
        ),
    )
    fg_async_save: bool = field(default=False, metadata=_help("Save checkpoints in the background."))
    fg_token_weighted_loss: bool = field(
        default=True, metadata=_help("Loss of a step: the mean over its targets. False: the mean of micro-batch means.")
    )
    fg_nonfinite_grad: str = field(
        default="stop", metadata=_help("On NaN or infinite gradients: stop, skip the update, or ignore.")
    )
    fg_global_batch_size: int | None = field(
        default=None, metadata=_help("Samples per optimizer step on all ranks, whatever their number.")
    )
    fg_ema_decay: float | None = field(default=None, metadata=_help("Keep an EMA of the weights with this decay."))
    fg_eval_ema: bool = field(default=False, metadata=_help("Evaluate the EMA weights too."))
    fg_param_precision: str = field(default="fp32", metadata=_help("fp32, bf16_master or bf16_stochastic weights."))
    fg_max_eval_steps: int = field(default=-1, metadata=_help("Maximum number of evaluation batches. Negative: all."))
    fg_preserve_best_model: bool = field(default=False, metadata=_help("Keep the best checkpoints besides the newest."))
    fg_shard_optimizer: bool = field(
        default=False, metadata=_help("ddp: divide the optimizer state over ranks (ZeRO-1).")
    )
    fg_n_microbatches: int | None = field(default=None, metadata=_help("pipeline: micro-batches per batch."))
    fg_stages_per_rank: int | None = field(default=None, metadata=_help("pipeline: stages per rank."))
    fg_pp_size: int | None = field(default=None, metadata=_help("hybrid: ranks per pipeline."))
    fg_pipe_schedule: str | None = field(default=None, metadata=_help("pipeline: schedule, such as 1F1B or GPipe."))
    fg_watch: dict | str | None = field(  # type: ignore[type-arg]
        default=None, metadata=_help("Time limits of the watch over ranks, as JSON.")
    )
    fg_options: dict | str | None = field(  # type: ignore[type-arg]
        default=None, metadata=_help("Any other argument of Forgather's trainers, as JSON.")
    )

    def _settle_own(self) -> None:
        if self.fg_strategy not in STRATEGIES:
            raise ValueError(f"fg_strategy={self.fg_strategy!r} cannot be used: choose one of {', '.join(STRATEGIES)}.")
        self.fg_options = _mapping("fg_options", self.fg_options)
        self.fg_watch = _mapping("fg_watch", self.fg_watch)


@dataclass
class TrainingArguments(ForgatherFields, transformers.TrainingArguments):
    """`transformers.TrainingArguments` with the fields of Forgather."""

    def __post_init__(self) -> None:
        _settle(self, super().__post_init__)

    @property
    def _setup_devices(self) -> Any:
        join_ranks(self)
        return super()._setup_devices


@dataclass
class Seq2SeqTrainingArguments(ForgatherFields, transformers.Seq2SeqTrainingArguments):
    """`transformers.Seq2SeqTrainingArguments` with the fields of Forgather."""

    def __post_init__(self) -> None:
        _settle(self, super().__post_init__)

    @property
    def _setup_devices(self) -> Any:
        join_ranks(self)
        return super()._setup_devices


def join_ranks(args: Any) -> None:
    """Create the process group of a launched job, unless it exists."""
    # Otherwise transformers creates it as soon as `args.device` is read. A group created here has the watch over ranks, a
    # gloo backend beside NCCL, and stores that survive restarts of torchrun.
    if get_world_size() == 1 or (dist.is_available() and dist.is_initialized()):
        return
    timeout = None if args.ddp_timeout == _TIMEOUT_OF_TRANSFORMERS else float(args.ddp_timeout)
    on_cpu = args.use_cpu or from_environment("ACCELERATE_USE_CPU")
    DistributedEnvironment(backend=args.ddp_backend, no_accelerator=on_cpu, timeout=timeout, log_level="WARNING")


def asked_fields(args: Any) -> set[str]:
    """Return the fields that were set to another value than their default, at creation or later."""
    before: set[str] | None = getattr(args, "_fg_asked", None)
    if before is None:
        # Arguments of transformers' own class: only their present values are known.
        return {one.name for one in dataclasses.fields(args) if not _is_default(one, getattr(args, one.name))}
    settled = args._fg_settled
    return before | {name for name, value in settled.items() if getattr(args, name) is not value}


def _settle(args: Any, post_init: Any) -> None:
    if not is_installed("accelerate"):
        # transformers needs it for every device, also where Forgather does not use it.
        raise MissingPackageError(f"{missing_message(type(args).__name__ + ' of transformers', 'accelerate')}.")
    fields = dataclasses.fields(args)
    # `__post_init__` of transformers changes values, so settings are compared with their defaults before it.
    args._fg_asked = {one.name for one in fields if not _is_default(one, getattr(args, one.name))}
    post_init()
    args._settle_own()
    args._fg_settled = {one.name: getattr(args, one.name) for one in fields}


def _is_default(one: "dataclasses.Field[Any]", value: object) -> bool:
    factory = one.default_factory
    default = one.default if factory is dataclasses.MISSING else factory()
    if isinstance(value, transformers.trainer_pt_utils.AcceleratorConfig):
        return bool(value == transformers.trainer_pt_utils.AcceleratorConfig())
    # Empty text, lists and None are the same setting, since transformers converts one into the other.
    return bool(value == default) or (not value and not default and not isinstance(value, (bool, int, float)))


def _mapping(name: str, value: dict[str, Any] | str | None) -> dict[str, Any] | None:
    """Return a mapping given as JSON text; other values unchanged."""
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name}={value!r} is not JSON: {error}. Write it as '{{\"name\": value}}'.") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"{name}={value!r} cannot be used: it must be a JSON object, such as '{{\"name\": value}}'.")
    return parsed
