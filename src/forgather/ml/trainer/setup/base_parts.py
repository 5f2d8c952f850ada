"""Factories for BaseTrainer: distributed environment, trainer state, checkpoint manager and model exporter.

Each is a function of the arguments and the declared state of a trainer, and holds no state. `BaseTrainer` calls them.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from forgather.ml.checkpoint.all_ranks import on_every_rank
from forgather.ml.checkpoint.coordinator import CheckpointCoordinator
from forgather.ml.checkpoint.errors import CheckpointSaveError
from forgather.ml.checkpoint.files.durable import make_directories, replace_file
from forgather.ml.checkpoint.files.layout import IN_OUTPUT_DIR, TRAINER_STATE_NAME
from forgather.ml.checkpoint.foreign.trainer_state import trainer_state_bytes
from forgather.ml.checkpoint.manager import CheckpointConfig, CheckpointManager
from forgather.ml.checkpoint.weights.adapters import ADAPTER_CONFIG, AdapterState, adapter_files, is_peft_model
from forgather.ml.distributed import (
    DistributedEnvInterface,
    DistributedEnvironment,
    Peers,
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
        checkpoint_layout=args.checkpoint_layout,
    )


def files_of_checkpoint(trainer: "BaseTrainer[Any]") -> dict[str, bytes]:
    """Return small files to add to a checkpoint, by name: adapters in PEFT's format, and files of `checkpoint_layout`."""
    files = {}
    model = None if trainer.model is None else trainer.unwrapped_model()
    # Only ranks that may lead a storage, since the files hold all adapters.
    if trainer.dist.local_rank == 0 and is_peft_model(model):
        files.update(adapter_files(model, trainer.processing_class, trainer.gathered_adapters))
    if trainer.args.checkpoint_layout == IN_OUTPUT_DIR:
        max_steps = getattr(trainer, "max_steps", None)
        planned = trainer.state.max_steps if max_steps is None else max_steps
        files[TRAINER_STATE_NAME] = trainer_state_bytes(trainer.state, planned, trainer.callbacks)
    return files


def model_state(model: nn.Module) -> nn.Module | AdapterState:
    """Return the stateful of the component "model": the model, or the trained part of a `PeftModel`."""
    return AdapterState(model) if is_peft_model(model) else model


def export_adapters(trainer: "BaseTrainer[Any]", output_dir: str) -> None:
    """Write the adapters of a `PeftModel` as PEFT does, by atomic replacement of each file. Collective."""

    def write() -> None:
        if trainer.dist.rank != 0:
            return
        files = adapter_files(trainer.unwrapped_model(), trainer.processing_class, trainer.gathered_adapters)
        # The configuration last: it makes the directory an adapter.
        for name, data in sorted(files.items(), key=lambda file: file[0].endswith(ADAPTER_CONFIG)):
            path = os.path.abspath(os.path.join(output_dir, name))
            make_directories(os.path.dirname(path))
            replace_file(path, data)

    on_every_rank(Peers.world(), write, f"writing the adapters to {output_dir}", CheckpointSaveError)


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
