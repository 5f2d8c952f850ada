"""Work of `forgather finalize`: loads the run's configuration, measures losses, and prints the report.

A checkpoint is untrusted data: a configuration stored in it may not name code to run. `forgather.ml.finalize` writes
the model.
"""

import argparse
import contextlib
import dataclasses
import logging
import math
from typing import Any

from rich.table import Table
from rich.text import Text
from torch import nn

from forgather.cli.errors import UsageError
from forgather.cli.output import format_bytes, print_json
from forgather.cli.process_setup import show_own_messages
from forgather.cli.work.evaluation_data import arguments_on_this_machine, evaluation_data
from forgather.cli.work.stored_run import device_of, output_dir_of
from forgather.config import model_builders
from forgather.config.schema import Configuration
from forgather.config.stored import EVALUATED_SECTIONS, config_option, read_configuration, refuse_code
from forgather.config.yaml_reader import CONFIG_NAME
from forgather.ml.checkpoint.errors import CheckpointNotFoundError
from forgather.ml.finalize import EvaluateT, FinalizeReport, ModelInitT, check_output, resolve_checkpoint
from forgather.ml.finalize import finalize as finalize_checkpoint
from forgather.ml.trainer.callbacks.display import LABEL_WIDTH, get_console, show_row
from forgather.tools.evaluation import evaluating_trainer

logger = logging.getLogger(__name__)

_NO_RECIPES = {"qat_recipe": None, "fp8_recipe": None, "default_dtype": None}
"""Arguments that would change the model: a quantised model is evaluated as it is."""


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
            sections = ("model",) if options.no_evaluation else EVALUATED_SECTIONS
            refuse_code(configuration, *sections, remedy=_remedy(checkpoint, options.no_evaluation))
    with contextlib.ExitStack() as stack:
        # Without quantisation the weights stay the same, and there is no loss to compare.
        evaluate, reason = None, "losses are measured only when a model is quantised"
        if options.quantize is not None:
            evaluate, reason = _evaluation_of(configuration, checkpoint, options.no_evaluation, stack)
        report = finalize_checkpoint(
            checkpoint,
            options.output,
            quantize=options.quantize,
            ema=options.ema,
            model_init=None if options.quantize is None else _model_init(configuration),
            evaluate=evaluate,
            device=device_of(configuration),
        )
    if options.json:
        print_json("finalize/1", as_plain_data(report) | ({} if evaluate else {"no_losses": reason}))
    else:
        _show(report, None if evaluate or options.quantize is None else reason)
    return 0


def _remedy(checkpoint: str, without_evaluation: bool) -> str:
    skip = "" if without_evaluation else " --no-evaluation skips the data and the loss."
    return config_option(checkpoint) + skip


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
    configuration: Configuration | None, checkpoint: str, is_unwanted: bool, stack: contextlib.ExitStack
) -> tuple[EvaluateT | None, str]:
    """Return the function that measures a loss, or None and the reason why losses cannot be measured."""
    if is_unwanted:
        return None, "--no-evaluation"
    if configuration is None:
        return None, f"the checkpoint has no {CONFIG_NAME} that names the data; pass --config CONFIG"
    output_dir = output_dir_of(checkpoint, configuration)
    remedy = "run the command there, or pass --config or --no-evaluation."
    data = stack.enter_context(evaluation_data(configuration, output_dir, remedy))
    if data.dataset is None:
        return None, "the run has no evaluation data"
    args = arguments_on_this_machine(configuration, **_NO_RECIPES)

    def loss_of(model: nn.Module) -> float:
        trainer = evaluating_trainer(args, data.dataset, model=model, **data.keywords)
        return float(trainer.evaluate()["eval_loss"])

    return loss_of, ""


def _model_init(configuration: Configuration | None) -> ModelInitT | None:
    """Return a function that builds the model, or None for transformers models, which the checkpoint describes."""
    if configuration is None or configuration.model.class_path is None:
        return None
    return model_builders.model_builder(configuration.model, None)


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
        table.add_row(label, format_bytes(num_bytes), *([f"{loss:.4f}"] if has_losses else []))
    console.print(table)
    if reason is not None:
        console.print(Text(f"The losses were not measured: {reason}."), soft_wrap=True)
    show_row("saved", report.output)
