"""Saved models, model cards and uploads to the Hugging Face Hub.

Only `create_repository` and `push` use the network. `prepare` creates the repository at construction, so a missing
connection or token is an error before training. The arguments are written as JSON, because pickles can run code.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from forgather.hf.arguments import join_ranks
from forgather.hf.fields.conversions import text_of
from forgather.ml.checkpoint.files.durable import replace_file
from forgather.ml.distributed.agreement import agreement
from forgather.ml.utils import unwrap_model

if TYPE_CHECKING:
    from forgather.hf.trainer import Trainer

ARGUMENTS_FILE = "training_args.json"
_AFTER_EACH_SAVE = ("every_save", "checkpoint", "all_checkpoints")


def prepare(trainer: "Trainer") -> None:
    """Create the repository if push_to_hub is set; raise an error if that is not possible."""
    if not trainer.args.push_to_hub:
        return
    join_ranks(trainer.args)
    # Only the main process creates the repository, and all ranks must learn that it failed.
    with agreement("creating the repository for push_to_hub"):
        trainer.init_hf_repo()
    if text_of(trainer.args.hub_strategy) in _AFTER_EACH_SAVE:
        trainer.add_callback(UploadAfterSave(trainer))


class UploadAfterSave:
    """Callback that uploads the model after each checkpoint."""

    changes_control = False

    def __init__(self, trainer: "Trainer") -> None:
        self._trainer = trainer

    def on_save(self, args: object, state: object, control: object, **kwargs: object) -> None:
        # The present weights are uploaded. After a background save, they are newer than the checkpoint.
        step = self._trainer.state.global_step
        self._trainer.push_to_hub(commit_message=f"Training in progress, step {step}")


def create_repository(trainer: "Trainer", token: str | None) -> None:
    """Create the repository; raise RuntimeError without network access. The main process only."""
    if not trainer.is_world_process_zero():
        return
    import huggingface_hub
    from huggingface_hub.constants import is_offline_mode

    args = trainer.args
    name = args.hub_model_id or Path(args.output_dir).absolute().name
    if is_offline_mode():
        raise _unreachable(name, "HF_HUB_OFFLINE is set")
    try:
        created = huggingface_hub.create_repo(
            name, token=token or args.hub_token, private=args.hub_private_repo, exist_ok=True
        )
    except Exception as error:
        raise _unreachable(name, f"{type(error).__name__}: {error}") from error
    trainer.hub_model_id = created.repo_id


def _unreachable(name: str, reason: str) -> RuntimeError:
    return RuntimeError(
        f"push_to_hub=True needs the repository {name!r} on the Hub, and it cannot be created now: {reason}. Log in with `hf "
        "auth login` and check the connection, or set push_to_hub=False and upload the directory after training."
    )


def after_training(trainer: "Trainer") -> None:
    """Upload the final model, unless it was uploaded after the last save."""
    if trainer.args.push_to_hub and text_of(trainer.args.hub_strategy) == "end":
        trainer.push_to_hub()


def push(
    trainer: "Trainer", message: str | None, token: str | None, revision: str | None, card: Mapping[str, Any]
) -> Any:
    """Save the model with its card and upload both; collective, and the main process uploads."""
    with agreement("creating the repository for push_to_hub"):
        if trainer.hub_model_id is None:
            trainer.init_hf_repo(token=token)
    trainer.save_model(_internal_call=True)
    with agreement("uploading to the Hub"):
        return _upload(trainer, message, token, revision, card) if trainer.is_world_process_zero() else None


def _upload(
    trainer: "Trainer", message: str | None, token: str | None, revision: str | None, card: Mapping[str, Any]
) -> Any:
    import huggingface_hub

    trainer.create_model_card(**card)
    args = trainer.args
    return huggingface_hub.upload_folder(
        repo_id=str(trainer.hub_model_id),
        folder_path=args.output_dir,
        commit_message=message,
        token=token or args.hub_token,
        revision=revision or args.hub_revision,
        ignore_patterns=["_*", "checkpoint-*", "checkpoints/*", "*.lock", "*.sock"],
    )


def save_model(trainer: "Trainer", output_dir: str | None) -> None:
    """Write the model; an overridden `_save` writes it on the main process instead."""
    directory = output_dir or trainer.args.output_dir
    if trainer._overrides("_save"):
        state = whole_state(trainer)
        if trainer.args.should_save:
            os.makedirs(directory, exist_ok=True)
            trainer._save(directory, state_dict=state)
        trainer.accelerator.wait_for_everyone()
        return
    trainer.engine.save_model(directory)
    if trainer.args.should_save:
        write_arguments(trainer, directory)


def whole_state(trainer: "Trainer") -> dict[str, Tensor]:
    """Return the weights of the model, gathered from shards; collective."""
    state = trainer.model.state_dict()
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}


def write_model(trainer: "Trainer", directory: str, state_dict: Mapping[str, Tensor] | None) -> None:
    """Write weights and configuration with `save_pretrained`, or weights alone for other models."""
    os.makedirs(directory, exist_ok=True)
    model: Any = unwrap_model(trainer.model)
    state = model.state_dict() if state_dict is None else dict(state_dict)
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(directory, state_dict=state)
    else:
        from safetensors.torch import save_file

        plain = {name: value.contiguous() for name, value in state.items()}
        save_file(plain, os.path.join(directory, "model.safetensors"), metadata={"format": "pt"})
    if trainer.processing_class is not None:
        trainer.processing_class.save_pretrained(directory)
    write_arguments(trainer, directory)


def write_arguments(trainer: "Trainer", directory: str) -> None:
    replace_file(os.path.join(directory, ARGUMENTS_FILE), f"{trainer.args.to_json_string()}\n".encode())


def write_model_card(trainer: "Trainer", *values: Any, **options: Any) -> None:
    """Write README.md from the configuration, the arguments and the log history."""
    if not trainer.is_world_process_zero():
        return
    from transformers.modelcard import TrainingSummary

    names = ("language", "license", "tags", "model_name", "finetuned_from", "tasks", "dataset_tags", "dataset")
    given = {**dict(zip((*names, "dataset_args"), values, strict=False)), **options}
    # Without a license, transformers would ask the Hub for the license of the base model.
    given["license"] = given.get("license") or ""
    card = TrainingSummary.from_trainer(trainer, **given).to_model_card()
    replace_file(os.path.join(trainer.args.output_dir, "README.md"), card.encode())
