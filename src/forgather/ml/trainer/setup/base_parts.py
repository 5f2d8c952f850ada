"""Factories for BaseTrainer: distributed environment, trainer state, checkpoint manager and model exporter.

Each is a function of the arguments and the declared state of a trainer, and holds no state. `BaseTrainer` calls them.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from forgather.ml.checkpoint.coordinator import CheckpointCoordinator
from forgather.ml.checkpoint.errors import CheckpointSaveError
from forgather.ml.checkpoint.manager import CheckpointConfig, CheckpointManager
from forgather.ml.distributed import (
    DistributedEnvInterface,
    DistributedEnvironment,
    StaticDistributedEnvironment,
    get_world_size,
)
from forgather.ml.distributed.launch_variables import check_launch_variables
from forgather.ml.trainer.arguments.training_arguments import MinimalTrainingArguments
from forgather.ml.trainer.trainer_types import TrainerState

if TYPE_CHECKING:
    from forgather.ml.trainer.base_trainer import BaseTrainer


def find_environment(given: DistributedEnvInterface | None, args: MinimalTrainingArguments) -> DistributedEnvInterface:
    """Return the given environment, or an environment from the launch variables."""
    if given is not None:
        return given
    check_launch_variables()
    # DistributedEnvironment initialises torch.distributed, which a single process does without.
    return (
        DistributedEnvironment(no_accelerator=args.use_cpu) if get_world_size() > 1 else StaticDistributedEnvironment()
    )


def new_state(args: MinimalTrainingArguments, env: DistributedEnvInterface) -> TrainerState:
    return TrainerState(
        logging_steps=args.logging_steps,
        eval_steps=args.eval_steps,
        train_batch_size=args.per_device_train_batch_size,
        max_steps=args.max_steps,
        num_train_epochs=args.num_train_epochs,
        max_eval_steps=getattr(args, "max_eval_steps", -1),
        save_steps=args.save_steps,
        is_local_process_zero=env.local_rank == 0,
        is_world_process_zero=env.rank == 0,
    )


def checkpoint_config(args: MinimalTrainingArguments) -> CheckpointConfig:
    return CheckpointConfig(
        output_dir=args.output_dir,
        save_total_limit=args.save_total_limit,
        save_on_each_node=args.save_on_each_node,
        save_safetensors=args.save_safetensors,
    )


def make_manager(
    trainer: "BaseTrainer[Any]", model: Mapping[str, Any], options: Mapping[str, Any]
) -> CheckpointManager:
    """Return a checkpoint manager for the declared state; `model` has the keywords for the model or its stages."""
    return CheckpointManager(
        trainer.checkpoint_config(),
        trainer.dist,
        trainer,
        model_preprocessor=trainer.processing_class,
        callbacks=trainer.callbacks,
        **model,
        **options,
    )


def model_exporter(trainer: "BaseTrainer[Any]", model: Mapping[str, Any]) -> CheckpointCoordinator:
    """Return a coordinator with the component "model" only, which exports a Hugging Face directory."""
    return CheckpointCoordinator(
        [component for component in trainer.get_state_components() if component.key == "model"],
        trainer.get_process_groups(),
        trainer.dist,
        trainer.args.output_dir,
        trainer.args.save_safetensors,
        model_preprocessor=trainer.processing_class,
        **model,
    )


def require_keys(owner: str, state: object, needed: set[str]) -> None:
    """Raise CheckpointSaveError if a `state_dict` override dropped keys of the base class."""
    # A checkpoint without these keys would load, but the resumed run would differ from an uninterrupted run.
    missing = sorted(needed - set(state if isinstance(state, Mapping) else ()))
    if missing:
        raise CheckpointSaveError(
            f"{owner}.state_dict() lacks the keys {', '.join(missing)}, which an exact resume needs. "
            "Start from state = super().state_dict(), and add your own keys."
        )
