"""Registry of trainers by the names of `--trainer`; a trainer is imported when it is used.

Imports no torch, so that help pages appear quickly. Used by the command line, the parser and the help page.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from forgather._extras import is_installed, missing_message
from forgather._suggestions import did_you_mean
from forgather.config.errors import UsageError

if TYPE_CHECKING:
    from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
    from forgather.ml.trainer.trainer import Trainer


@dataclass(frozen=True)
class TrainerKind:
    """Modules and class names of a trainer and its arguments, and its capabilities."""

    module: str
    class_name: str
    arguments_module: str
    arguments_name: str
    uses_processes: bool = True
    own_keywords: tuple[str, ...] = ()
    """Constructor arguments that `make_own_keywords` creates."""
    has_stages: bool = False
    """Whether it splits the model into pipeline stages, with a schedule and a splitter."""


_TRAINER_PACKAGE = "forgather.ml.trainer"
# Names of modules and classes: importing the classes would import torch.
TRAINERS = {
    "single": TrainerKind(
        f"{_TRAINER_PACKAGE}.trainer", "Trainer", f"{_TRAINER_PACKAGE}.arguments", "TrainingArguments", False
    ),
    "ddp": TrainerKind(
        f"{_TRAINER_PACKAGE}.ddp.ddp_trainer",
        "DDPTrainer",
        f"{_TRAINER_PACKAGE}.ddp.ddp_arguments",
        "DDPTrainingArguments",
    ),
    "fsdp2": TrainerKind(
        f"{_TRAINER_PACKAGE}.fsdp2.fsdp2_trainer",
        "FSDP2Trainer",
        f"{_TRAINER_PACKAGE}.fsdp2.fsdp2_arguments",
        "FSDP2TrainingArguments",
    ),
    "accelerate": TrainerKind(
        f"{_TRAINER_PACKAGE}.accelerate.accel_trainer",
        "AccelTrainer",
        f"{_TRAINER_PACKAGE}.accelerate.accel_trainer",
        "AccelTrainingArguments",
        own_keywords=("accelerator",),
    ),
    "pipeline": TrainerKind(
        f"{_TRAINER_PACKAGE}.pipeline.pipeline_trainer",
        "PipelineTrainer",
        f"{_TRAINER_PACKAGE}.pipeline.pipeline_arguments",
        "PipelineTrainingArguments",
        has_stages=True,
    ),
    "hybrid": TrainerKind(
        f"{_TRAINER_PACKAGE}.hybrid.hybrid_trainer",
        "HybridTrainer",
        f"{_TRAINER_PACKAGE}.hybrid.hybrid_arguments",
        "HybridTrainingArguments",
        has_stages=True,
    ),
}
DEFAULT_KIND = "single"


def find_kind(kind: str) -> TrainerKind:
    """Return the trainer with this name; raise UsageError for an unknown name."""
    if kind in TRAINERS:
        return TRAINERS[kind]
    available = f"this version has: {', '.join(TRAINERS)}"
    hint = did_you_mean(kind, list(TRAINERS))
    raise UsageError(f"trainer.kind={kind!r}: there is no such trainer; {available}.{hint}")


def load_trainer(kind: str) -> "type[Trainer[Any]]":
    """Import and return the class of a trainer."""
    found = find_kind(kind)
    _require_accelerate(kind)
    trainer_class: type[Trainer[Any]] = getattr(import_module(found.module), found.class_name)
    return trainer_class


def load_arguments(kind: str) -> "type[TrainingArguments]":
    """Import and return the class of a trainer's arguments."""
    found = find_kind(kind)
    _require_accelerate(kind)
    arguments_class: type[TrainingArguments] = getattr(import_module(found.arguments_module), found.arguments_name)
    return arguments_class


def check_num_processes(kind: str, num_processes: int) -> None:
    """Raise UsageError for more than one process with a single-process trainer."""
    if num_processes == 1 or find_kind(kind).uses_processes:
        return
    able = " or ".join(f"--trainer {name}" for name, one in TRAINERS.items() if one.uses_processes)
    raise UsageError(
        f"--trainer {kind} trains in one process, but the job has {num_processes}: each process would train the same model "
        f"and write to the same output directory. Use {able}, which share the work, or start one process."
    )


def make_own_keywords(kind: str, args: "TrainingArguments") -> dict[str, Any]:
    """Return constructor arguments that only this trainer has."""
    if kind != "accelerate":
        return {}
    import torch

    # Accelerate chooses the device itself, so use_cpu must be passed on.
    on_cpu = args.use_cpu or not torch.accelerator.is_available()
    accelerator = import_module("accelerate").Accelerator(cpu=on_cpu, mixed_precision=args.mixed_precision)
    return {"accelerator": accelerator}


def _require_accelerate(kind: str) -> None:
    if kind == "accelerate" and not is_installed("accelerate"):
        raise UsageError(f"{missing_message('--trainer accelerate', 'accelerate')}.")
