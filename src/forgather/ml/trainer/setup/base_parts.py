"""Parts of BaseTrainer: environment, state, checkpoint manager and exporter, made from arguments and declared state."""

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
    """The given environment, else that of the launcher; several ranks initialise torch.distributed."""
    if given is not None:
        return given
    check_launch_variables()
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
    """A manager of a trainer's declared state; `model` are the arguments that name the model or its parts."""
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
    """A coordinator of the model alone, which writes it as a Hugging Face directory."""
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
    """Raise if a `state_dict` override dropped keys of the base: a resume would not be exact."""
    missing = sorted(needed - set(state if isinstance(state, Mapping) else ()))
    if missing:
        raise CheckpointSaveError(
            f"{owner}.state_dict() lacks the keys {', '.join(missing)}, without which a resume is not exact. "
            "Start from the base: state = super().state_dict(), and add keys of your own to it."
        )
