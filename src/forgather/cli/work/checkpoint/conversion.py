"""Work of `forgather checkpoint import`: builds model, optimizer and schedule of a configuration, and imports into them."""

import argparse
import dataclasses
import functools
import logging
import os
from typing import Any

import torch

from forgather.cli.command_line import DONE
from forgather.cli.errors import UsageError
from forgather.cli.output import print_json
from forgather.cli.work.checkpoint.shared import usage_errors
from forgather.config import builders, class_paths, model_builders, yaml_reader
from forgather.config.parser import to_dict
from forgather.config.stored import read_configuration
from forgather.config.yaml_reader import CONFIG_NAME
from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.finalize import model_of_transformers
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.callbacks.display import show_row
from forgather.tools.checkpoints.conversion import ImportedCheckpoint, import_as_checkpoint, require_importable

_SINGLE_ONLY = {
    "device": None,
    "torch_compile": False,
    "construct_model_on": "default",
    "replica_check_steps": 0,
    "resume_from_checkpoint": False,
    "ema_decay": None,
    "eval_ema": False,
}
"""Neutral values of arguments that only training needs."""


def run(options: argparse.Namespace) -> int:
    """Import the checkpoint; returns the exit code."""
    with usage_errors(FileExistsError):
        require_importable(options.path)
        keywords = _keywords(options)
        # The report below says the same as the log message of the import.
        logging.getLogger("forgather.ml.checkpoint.foreign").setLevel(logging.ERROR)
        result = import_as_checkpoint(options.path, options.output, **keywords)
    if options.json:
        print_json("checkpoint.import/1", {**dataclasses.asdict(result), "owner": result.owner.value})
    else:
        _show(result)
    return DONE


def _keywords(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the import for `--model`: a configuration, a directory, or none."""
    if options.model is None or os.path.isdir(options.model):
        folder = options.model or options.path
        if not os.path.exists(os.path.join(folder, "config.json")):
            raise UsageError(
                f"{folder} has no config.json that describes the model. Pass --model CONFIG, the configuration of the run "
                "(.yaml), or --model DIR, a directory with config.json."
            )
        _require_model(folder, options.path)
        return {"model_init": functools.partial(model_of_transformers, folder, options.path)}
    configuration = read_configuration(options.path, options.model)
    assert configuration is not None
    tokenizer = builders.build_tokenizer(configuration.tokenizer)
    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    args = {name: value for name, value in configuration.args.to_dict().items() if name in known}
    configuration.args.output_dir = options.output
    return {
        "model_init": model_builders.model_builder(configuration.model, tokenizer),
        "optimizer_factory": class_paths.partial(configuration.optimizer, "optimizer"),
        "lr_scheduler_factory": class_paths.partial(configuration.lr_scheduler, "lr_scheduler"),
        "optimizer_groups": builders.build_optimizer_groups(configuration.optimizer_groups),
        "processing_class": tokenizer,
        "args": args | {name: value for name, value in _SINGLE_ONLY.items() if name in known},
        "files": {CONFIG_NAME: yaml_reader.dump(to_dict(configuration)).encode()},
    }


def _require_model(folder: str, weights_path: str) -> None:
    """Raise `UsageError` unless transformers can build the model that a directory describes; allocates no memory."""
    try:
        with torch.device("meta"):
            model_of_transformers(folder, weights_path)
    except (CheckpointLoadError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"The model in {folder} cannot be built: {reason} Pass --model CONFIG, the configuration of the run (.yaml)."
        ) from None


def _show(result: ImportedCheckpoint) -> None:
    show_row("original", f"{result.source}, {result.owner.value} (unchanged)")
    show_row("imported", ", ".join(result.taken))
    label = "left out"
    for name, reason in result.left_out.items():
        show_row(label, f"{name}: {reason}")
        label = ""
    show_row("saved", result.path)
    folder = os.path.dirname(os.path.dirname(result.path))
    show_row("resume", f"forgather train CONFIG --args.output_dir {folder}")
