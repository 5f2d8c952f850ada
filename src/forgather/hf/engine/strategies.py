"""Engine classes by strategy: each combines the hooks of the facade with a trainer of Forgather.

`make_engine` imports only the strategy of the run. `Trainer` of this package calls it at construction.
"""

from collections.abc import Callable
from typing import Any

from forgather.hf.engine.hooks import FacadeHooks, LossHooks
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.trainer import Trainer


def _single() -> type[Any]:
    class SingleEngine(LossHooks, FacadeHooks, Trainer[TrainingArguments]):
        """Engine for one device."""

    return SingleEngine


def _ddp() -> type[Any]:
    from forgather.ml.trainer.ddp import DDPTrainer, DDPTrainingArguments

    class DDPEngine(LossHooks, FacadeHooks, DDPTrainer[DDPTrainingArguments]):
        """Engine for data parallelism."""

    return DDPEngine


def _fsdp2() -> type[Any]:
    from forgather.ml.trainer.fsdp2 import FSDP2Trainer, FSDP2TrainingArguments

    class FSDP2Engine(LossHooks, FacadeHooks, FSDP2Trainer[FSDP2TrainingArguments]):
        """Engine for fully sharded data parallelism."""

    return FSDP2Engine


def _accelerate() -> type[Any]:
    from forgather.ml.trainer.accelerate import AccelTrainer, AccelTrainingArguments

    class AccelEngine(LossHooks, FacadeHooks, AccelTrainer[AccelTrainingArguments]):
        """Engine for data parallelism through Accelerate."""

    return AccelEngine


def _pipeline() -> type[Any]:
    from forgather.ml.trainer.pipeline import PipelineTrainer, PipelineTrainingArguments

    class PipelineEngine(FacadeHooks, PipelineTrainer[PipelineTrainingArguments]):
        """Engine for pipeline parallelism."""

    return PipelineEngine


def _hybrid() -> type[Any]:
    from forgather.ml.trainer.hybrid import HybridTrainer, HybridTrainingArguments

    class HybridEngine(FacadeHooks, HybridTrainer[HybridTrainingArguments]):
        """Engine for several pipelines."""

    return HybridEngine


_MAKERS: dict[str, Callable[[], type[Any]]] = {
    "single": _single,
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "accelerate": _accelerate,
    "pipeline": _pipeline,
    "hybrid": _hybrid,
}
PIPELINES = ("pipeline", "hybrid")


def engine_class(strategy: str) -> type[Any]:
    """Return the engine class of a strategy."""
    return _MAKERS[strategy]()
