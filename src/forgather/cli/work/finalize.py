"""Work of `forgather finalize`: loads the run's configuration, measures losses, and prints the report.

A checkpoint is untrusted data: a configuration stored in it may not name code to run. `forgather.ml.finalize` writes
the model.
"""

import argparse
import dataclasses
import json
import logging
import math
import os
from typing import Any

import torch
from rich.table import Table
from rich.text import Text
from torch import nn

from forgather.cli.config import builders, data_builders, model_builders
from forgather.cli.config.parser import ConfigurationParser, trainer_kind
from forgather.cli.config.schema import Configuration
from forgather.cli.errors import UsageError
from forgather.cli.process_setup import show_own_messages
from forgather.cli.work.stored_configuration import CONFIG_NAME
from forgather.ml.checkpoint.errors import CheckpointNotFoundError
from forgather.ml.checkpoint.store import CHECKPOINTS_FOLDER
from forgather.ml.finalize import FinalizeReport, ModelInitT, check_output, resolve_checkpoint
from forgather.ml.finalize import finalize as finalize_checkpoint
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments, arguments_from
from forgather.ml.trainer.callbacks.display import LABEL_WIDTH, get_console, show_row
from forgather.ml.trainer.trainer import Trainer

logger = logging.getLogger(__name__)

_OWN_DOCUMENTS = "forgather.data.standard_library.standard_library_documents"
_NOT_FOR_EVALUATION = {
    "qat_recipe": None,
    "fp8_recipe": None,
    "ema_decay": None,
    "eval_ema": False,
    "torch_compile": False,
    "torch_compile_scope": "model",
    "activation_memory_budget": None,
    "construct_model_on": "default",
    "default_dtype": None,
    "fuse_optim_with_backward": False,
    "gradient_checkpointing": False,
}
"""Neutral values of arguments that change the model, or that only training needs."""


def finalize(options: argparse.Namespace) -> int:
    """Export the checkpoint as the command line requests; returns the exit code."""
    show_own_messages()
    try:
        checkpoint = resolve_checkpoint(options.path)
    except CheckpointNotFoundError as error:
        raise UsageError(str(error)) from None
    try:
        # Check the output before the data and the model are read, which takes long.
        check_output(options.output, checkpoint)
    except FileExistsError as error:
        raise UsageError(str(error)) from None
    configuration = read_configuration(checkpoint, options.config)
    if configuration is not None:
        _compare_recipes(configuration, options.quantize)
        if options.config is None and options.quantize is not None:
            _refuse_code(configuration, checkpoint, options.no_evaluation)
    # Without quantisation the weights stay the same, and there is no loss to compare.
    evaluation, reason = None, "losses are measured only when a model is quantised"
    if options.quantize is not None:
        evaluation, reason = _evaluation_of(configuration, checkpoint, options.no_evaluation)
    report = finalize_checkpoint(
        checkpoint,
        options.output,
        quantize=options.quantize,
        ema=options.ema,
        model_init=None if options.quantize is None else _model_init(configuration),
        evaluate=None if evaluation is None else evaluation.loss_of,
        device=_device(configuration),
    )
    if options.json:
        print(json.dumps(as_plain_data(report) | ({} if evaluation else {"no_losses": reason}), indent=2))
    else:
        _show(report, None if evaluation or options.quantize is None else reason)
    return 0


def read_configuration(checkpoint: str, path: str | None = None) -> Configuration | None:
    """Return the configuration in a file, or the one stored in the checkpoint, or None."""
    path = path or os.path.join(checkpoint, CONFIG_NAME)
    # Only the stored configuration is optional: `read_file` reports a missing --config.
    if not os.path.exists(path) and path == os.path.join(checkpoint, CONFIG_NAME):
        return None
    parser = ConfigurationParser(trainer_kind(path, []))
    parser.read_file(path)
    return parser.configuration()


def _refuse_code(configuration: Configuration, checkpoint: str, without_evaluation: bool) -> None:
    """Raise UsageError if a configuration stored in the checkpoint would import and call code: checkpoints are data."""
    named: dict[str, object] = {"model.class_path": configuration.model.class_path}
    if not without_evaluation:
        # init_args may enable trust_remote_code, and files would be written to cache_dir. The documents of the demo are
        # Forgather's own code.
        named |= {
            "tokenizer.class_path": configuration.tokenizer.class_path,
            "tokenizer.init_args": configuration.tokenizer.init_args,
            "loss.class_path": configuration.loss.class_path,
            "data.class_path": None
            if configuration.data.class_path == _OWN_DOCUMENTS
            else configuration.data.class_path,
            "data.cache_dir": configuration.data.cache_dir,
        }
    used = [name for name, value in named.items() if value]
    if used:
        path = os.path.join(checkpoint, CONFIG_NAME)
        raise UsageError(
            f"The configuration in the checkpoint sets {', '.join(used)}, and using it would run code that the checkpoint "
            f"names. If you trust it, pass --config {path}."
            + ("" if without_evaluation else " --no-evaluation skips the data and the loss.")
        )


class Evaluation:
    """Evaluation of models with the data and the loss of a configuration, as in its trainer."""

    def __init__(self, configuration: Configuration, output_dir: str) -> None:
        self._tokenizer = builders.build_tokenizer(configuration.tokenizer)
        self._loss = builders.build_loss(configuration.loss)
        self._args = _arguments_for_evaluation(configuration)
        # Cached tokens of the run are reused, even if its output directory was moved.
        args = dataclasses.replace(configuration.args, output_dir=output_dir)
        self.dataset = data_builders.build_datasets(configuration.data, self._tokenizer, args).eval

    def loss_of(self, model: nn.Module) -> float:
        """Return the evaluation loss of a model."""
        trainer = Trainer(
            args=self._args,
            model=model,
            eval_dataset=self.dataset,
            processing_class=self._tokenizer,
            default_callbacks=False,
            **self._loss,
        )
        return float(trainer.evaluate()["eval_loss"])


def as_plain_data(report: FinalizeReport) -> dict[str, Any]:
    """Return a report as data that JSON can represent."""
    data = dataclasses.asdict(report)
    for name in ("loss_before", "loss_after"):
        if data[name] is not None and not math.isfinite(data[name]):
            # JSON has no NaN and no infinity.
            data[name] = str(data[name])
    if report.layers is not None:
        data["layers"]["total"] = report.layers.total
    return data


def _evaluation_of(
    configuration: Configuration | None, checkpoint: str, is_unwanted: bool
) -> tuple[Evaluation | None, str]:
    """Return the evaluation, or None and the reason why losses cannot be measured."""
    if is_unwanted:
        return None, "--no-evaluation"
    if configuration is None:
        return None, f"the checkpoint has no {CONFIG_NAME} that names the data; pass --config CONFIG"
    try:
        evaluation = Evaluation(configuration, _output_dir_of(checkpoint, configuration))
    except (FileNotFoundError, UsageError) as error:
        raise UsageError(
            f"Losses cannot be measured, because the data of the run cannot be loaded: {error} Relative paths start where "
            "training was started: run the command there, or pass --config or --no-evaluation."
        ) from None
    return (None, "the run has no evaluation data") if evaluation.dataset is None else (evaluation, "")


def _arguments_for_evaluation(configuration: Configuration) -> TrainingArguments:
    """Return the run's arguments without settings that change the model or that only another trainer has."""
    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    changes = {name: value for name, value in _NOT_FOR_EVALUATION.items() if name in known}
    values = {name: value for name, value in configuration.args.to_dict().items() if name in known}
    values["device"] = None if configuration.args.use_cpu else _device(configuration)
    return arguments_from(TrainingArguments, values | changes)


def _output_dir_of(checkpoint: str, configuration: Configuration) -> str:
    """Return the output directory of the run, which holds its tokens; it may have been moved since training."""
    folder, _ = os.path.split(os.path.abspath(checkpoint))
    return os.path.dirname(folder) if os.path.basename(folder) == CHECKPOINTS_FOLDER else configuration.args.output_dir


def _model_init(configuration: Configuration | None) -> ModelInitT | None:
    """Return a function that builds the model, or None for transformers models, which the checkpoint describes."""
    if configuration is None or configuration.model.class_path is None:
        return None
    return model_builders.model_builder(configuration.model, None)


def _device(configuration: Configuration | None) -> str | None:
    """Return the device of the run if this machine has it; None lets the library choose."""
    if configuration is None:
        return None
    asked = "cpu" if configuration.args.use_cpu else configuration.args.device
    present = {"cpu"} | ({str(torch.accelerator.current_accelerator())} if torch.accelerator.is_available() else set())
    if asked is None or torch.device(asked).type in present:
        return asked
    logger.warning("The run used %s, which this machine does not have: using %s.", asked, " or ".join(sorted(present)))
    return None


def _compare_recipes(configuration: Configuration, recipe: str | None) -> None:
    trained = configuration.args.qat_recipe
    if trained is None or recipe == trained:
        return
    if recipe is None:
        logger.info("The model was trained for --quantize %s; it is written in full precision.", trained)
    else:
        logger.warning("The model was trained for --quantize %s: its loss may be higher with %s.", trained, recipe)


def _show(report: FinalizeReport, reason: str | None) -> None:
    """Print the checkpoint, a table of sizes and losses, and the output path."""
    console = get_console()
    show_row("checkpoint", report.checkpoint + (", averaged weights" if report.averaged else ""))
    if report.layers is not None:
        show_row("recipe", f"{report.recipe}, {len(report.layers.converted)} of {report.layers.total} linear layers")
    has_losses = report.loss_after is not None
    table = Table(box=None, pad_edge=False)
    table.add_column("", min_width=LABEL_WIDTH, style="bold")
    names = ("weights", "loss") if has_losses else ("weights",)
    for name in names:
        table.add_column(name, justify="right")
    rows = {"before": (report.bytes_before, report.loss_before), "after": (report.bytes_after, report.loss_after)}
    for label, (num_bytes, loss) in rows.items():
        table.add_row(label, _size(num_bytes), *([f"{loss:.4f}"] if has_losses else []))
    console.print(table)
    if reason is not None:
        console.print(Text(f"The losses were not measured: {reason}."), soft_wrap=True)
    show_row("saved", report.output)


def _size(num_bytes: int) -> str:
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} B"
