"""The trainers by the names that `--trainer` knows; each is imported when it is asked for."""

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from forgather._suggestions import did_you_mean
from forgather.cli.errors import UsageError

if TYPE_CHECKING:
    from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
    from forgather.ml.trainer.trainer import Trainer


@dataclass(frozen=True)
class TrainerKind:
    """Where a trainer is, where the class of its arguments is, and whether it uses more than one process."""

    module: str
    class_name: str
    arguments_module: str
    arguments_name: str
    uses_processes: bool = True
    own_keywords: tuple[str, ...] = ()
    """Keywords of its constructor that `make_own_keywords` makes."""
    has_stages: bool = False
    """Whether it divides the model, by a schedule and a splitter."""


_TRAINER_PACKAGE = "forgather.ml.trainer"
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
_PLANNED_TRAINERS = ("fsdp2",)


def find_kind(kind: str) -> TrainerKind:
    """The trainer of that name."""
    if kind in TRAINERS:
        return TRAINERS[kind]
    available = f"this version has: {', '.join(TRAINERS)}"
    if kind in _PLANNED_TRAINERS:
        raise UsageError(f"trainer.kind={kind!r} is not available yet; {available}.")
    hint = did_you_mean(kind, [*TRAINERS, *_PLANNED_TRAINERS])
    raise UsageError(f"trainer.kind={kind!r}: there is no such trainer; {available}.{hint}")


def load_trainer(kind: str) -> "type[Trainer[Any]]":
    """The class of a trainer."""
    found = find_kind(kind)
    _require_accelerate(kind)
    trainer_class: type[Trainer[Any]] = getattr(import_module(found.module), found.class_name)
    return trainer_class


def load_arguments(kind: str) -> "type[TrainingArguments]":
    """The class of a trainer's arguments."""
    found = find_kind(kind)
    _require_accelerate(kind)
    arguments_class: type[TrainingArguments] = getattr(import_module(found.arguments_module), found.arguments_name)
    return arguments_class


def check_num_processes(kind: str, num_processes: int) -> None:
    """Refuse several processes for a trainer that uses one."""
    if num_processes == 1 or find_kind(kind).uses_processes:
        return
    able = " or ".join(f"--trainer {name}" for name, one in TRAINERS.items() if one.uses_processes)
    raise UsageError(
        f"--trainer {kind} trains in one process, but the job has {num_processes}: each of them would train the same model "
        f"and write to the same output directory. Add {able}, which share the work, or ask for one process."
    )


def make_own_keywords(kind: str, args: "TrainingArguments") -> dict[str, Any]:
    """What the constructor of a trainer needs beside what all of them take."""
    if kind != "accelerate":
        return {}
    import torch

    on_cpu = args.use_cpu or not torch.accelerator.is_available()
    accelerator = import_module("accelerate").Accelerator(cpu=on_cpu, mixed_precision=args.mixed_precision)
    return {"accelerator": accelerator}


def _require_accelerate(kind: str) -> None:
    if kind == "accelerate" and find_spec("accelerate") is None:
        raise UsageError(
            "--trainer accelerate needs the package accelerate, which is not installed: pip install accelerate."
        )
