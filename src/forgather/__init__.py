"""Forgather: one training loop and one checkpoint system for every kind of parallelism.

The public names below are imported lazily, on first use: `import forgather` imports neither torch nor any other
third-party library. Everything else is in `forgather.ml` (training, distribution, checkpoints), `forgather.data` (text
to tokens), `forgather.config` (configuration files), `forgather.tools` (functions for during and after training) and
`forgather.cli` (the command-line program).
"""

from typing import TYPE_CHECKING

from forgather._lazy import lazily, listing

if TYPE_CHECKING:
    from forgather.ml.distributed import DistributedEnvironment, DistributedError, main_process_first
    from forgather.ml.trainer import (
        AccelTrainer,
        AccelTrainingArguments,
        BaseTrainer,
        BaseTrainingArguments,
        DDPTrainer,
        DDPTrainingArguments,
        FSDP2Trainer,
        FSDP2TrainingArguments,
        HybridTrainer,
        HybridTrainingArguments,
        IntervalStrategy,
        MinimalTrainingArguments,
        NonFiniteError,
        PipelineTrainer,
        PipelineTrainingArguments,
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
        TrainOutput,
    )
    from forgather.ml.trainer.checkpoint_coordinator import (
        CheckpointCoordinator,
        CheckpointError,
        CheckpointLoadError,
        CheckpointSaveError,
    )
    from forgather.ml.trainer.checkpoint_manager import CheckpointConfig, CheckpointManager, RNGState
    from forgather.ml.trainer.checkpoint_types import SharingPattern, StateComponent
    from forgather.ml.trainer.pipeline import ModelSplitter

__version__ = "0.1.0"

__all__ = [
    "AccelTrainer",
    "AccelTrainingArguments",
    "BaseTrainer",
    "BaseTrainingArguments",
    "CheckpointConfig",
    "CheckpointCoordinator",
    "CheckpointError",
    "CheckpointLoadError",
    "CheckpointManager",
    "CheckpointSaveError",
    "DDPTrainer",
    "DDPTrainingArguments",
    "DistributedEnvironment",
    "DistributedError",
    "FSDP2Trainer",
    "FSDP2TrainingArguments",
    "HybridTrainer",
    "HybridTrainingArguments",
    "IntervalStrategy",
    "MinimalTrainingArguments",
    "ModelSplitter",
    "NonFiniteError",
    "PipelineTrainer",
    "PipelineTrainingArguments",
    "RNGState",
    "SharingPattern",
    "StateComponent",
    "TrainOutput",
    "Trainer",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
    "TrainingArguments",
    "main_process_first",
]

_OTHER_HOMES = {
    "CheckpointConfig": "ml.trainer.checkpoint_manager",
    "CheckpointCoordinator": "ml.trainer.checkpoint_coordinator",
    "CheckpointError": "ml.trainer.checkpoint_coordinator",
    "CheckpointLoadError": "ml.trainer.checkpoint_coordinator",
    "CheckpointManager": "ml.trainer.checkpoint_manager",
    "CheckpointSaveError": "ml.trainer.checkpoint_coordinator",
    "DistributedEnvironment": "ml.distributed",
    "DistributedError": "ml.distributed",
    "ModelSplitter": "ml.trainer.pipeline",
    "RNGState": "ml.trainer.checkpoint_manager",
    "main_process_first": "ml.distributed",
}
_HOMES = dict.fromkeys(__all__, "ml.trainer") | _OTHER_HOMES

if not TYPE_CHECKING:
    # A module-level `__getattr__` would make type checkers accept any attribute name, so they do not see it.
    __getattr__ = lazily(__name__, _HOMES)
    __dir__ = listing(__name__, _HOMES)
