"""Work of `forgather evaluate`: builds model and data as `forgather train` does, and prints the loss of checkpoints.

Nothing is written into the directory of the run, and its lock is not taken: the run may continue meanwhile.
"""

import argparse
import contextlib
import dataclasses
import logging
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from forgather._terminal_text import printable
from forgather.cli.command_line import DONE, FAILED
from forgather.cli.errors import UsageError
from forgather.cli.output import note, print_json, show_table
from forgather.cli.process_setup import make_current_directory_importable, show_own_messages
from forgather.cli.work.evaluation_data import EvaluationData, arguments_on_this_machine, evaluation_data
from forgather.cli.work.stored_run import output_dir_of
from forgather.config import model_builders
from forgather.config.parser import Option, split_options
from forgather.config.schema import Configuration
from forgather.config.stored import EVALUATED_SECTIONS, read_configuration, refuse_code
from forgather.config.yaml_reader import CONFIG_NAME
from forgather.ml.checkpoint.errors import CheckpointError, CheckpointNotFoundError
from forgather.ml.finalize import ModelInitT, complete_checkpoints, resolve_checkpoint
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.callbacks.display import can_draw, planned_eval_batches, show_row
from forgather.ml.trainer.trainer_types import TrainerCallback, TrainerControl, TrainerState
from forgather.tools.checkpoints.paths import find_checkpoint
from forgather.tools.evaluation import CheckpointEvaluation, evaluate_checkpoint

_OWN_METRICS = ("eval_loss", "eval_tokens")
_LOGGER_OF_LOSSES = "forgather.ml.trainer.step_loss"
"""Logger that tells the choice of the loss for each trainer, and so for each checkpoint."""


@dataclass(frozen=True)
class _Run:
    """Run to evaluate: its configuration, and whether the user named the file, so that it may name code."""

    configuration: Configuration
    output_dir: str
    is_trusted: bool
    default_checkpoint: str | None
    """Checkpoint in the directory that the user named instead of a configuration."""


@dataclass(frozen=True)
class _Failure:
    """Checkpoint that could not be evaluated."""

    checkpoint: str
    error: str


def evaluate(options: argparse.Namespace, keys: Sequence[str]) -> int:
    """Evaluate checkpoints as the command line requests; returns the exit code."""
    show_own_messages()
    _, overrides = split_options(keys)
    try:
        run = _find_run(options.path, overrides)
        checkpoints = _chosen(run, options.checkpoint, options.all)
    except CheckpointNotFoundError as error:
        raise UsageError(str(error)) from None
    remedy = "run the command there, or override the paths, such as --data.files FILES."
    with evaluation_data(run.configuration, run.output_dir, remedy) as data:
        if data.dataset is None:
            raise UsageError(
                "The configuration has no evaluation data. Set --data.eval_files FILES, or another data.eval_fraction "
                "than in training."
            )
        with _quiet(_LOGGER_OF_LOSSES):
            results = list(_results(run, data, checkpoints, options.ema))
    evaluated = [one for one in results if isinstance(one, CheckpointEvaluation)]
    failed = [one for one in results if isinstance(one, _Failure)]
    if options.json:
        print_json("evaluate/1", {"checkpoints": [_plain(one) for one in results]})
    elif len(results) == 1 and evaluated:
        _show_one(evaluated[0])
    elif evaluated:
        _show_table(evaluated)
    for one in failed:
        note(f"forgather: {one.checkpoint} was not evaluated: {one.error}")
    return FAILED if failed else DONE


def _find_run(path: str, overrides: Sequence[Option]) -> _Run:
    """Return the run of a configuration file, of a checkpoint, or of an output directory."""
    if os.path.isfile(path):
        make_current_directory_importable()
        configuration = read_configuration("", path, overrides)
        assert configuration is not None
        return _Run(configuration, configuration.args.output_dir, True, None)
    checkpoint = resolve_checkpoint(find_checkpoint(path))
    configuration = _stored_configuration(path, checkpoint, overrides)
    return _Run(configuration, output_dir_of(checkpoint, configuration), False, checkpoint)


def _stored_configuration(path: str, checkpoint: str, overrides: Sequence[Option]) -> Configuration:
    """Return the configuration in a checkpoint, after a check that it names no code."""
    keys = [option.key for option in overrides]
    if any(key.partition(".")[0] == "model" for key in keys):
        raise UsageError(
            f"The model of {path} is described by the checkpoint. To override keys of the section model, give the "
            "configuration file instead of a directory."
        )
    configuration = read_configuration(checkpoint, options=overrides)
    if configuration is None:
        raise UsageError(
            f"{checkpoint} has no {CONFIG_NAME} that names the data, because its run was not started by forgather train. "
            f"Give a configuration: forgather evaluate CONFIG --checkpoint {checkpoint}."
        )
    remedy = f"run: forgather evaluate {os.path.join(checkpoint, CONFIG_NAME)} --checkpoint {checkpoint}"
    refuse_code(configuration, *EVALUATED_SECTIONS, remedy=remedy, given=keys)
    return configuration


def _chosen(run: _Run, named: Sequence[str], every: bool) -> list[str]:
    """Return the checkpoints to evaluate: those that the user named, all, or the newest."""
    if every and named:
        raise UsageError("--all and --checkpoint cannot be combined: remove one of the two.")
    if every:
        found = complete_checkpoints(run.output_dir)
        return [one.path for one in sorted(found, key=lambda one: one.manifest.step or 0)]
    if named:
        return [resolve_checkpoint(find_checkpoint(path)) for path in named]
    return [run.default_checkpoint or complete_checkpoints(run.output_dir)[-1].path]


def _results(
    run: _Run, data: EvaluationData, checkpoints: Collection[str], ema: bool
) -> Iterator[CheckpointEvaluation | _Failure]:
    """Evaluate checkpoints one by one; with several, one that fails does not stop the others."""
    keywords: dict[str, Any] = {
        "args": arguments_on_this_machine(run.configuration),
        "model_init": _model_init(run, data),
    }
    for checkpoint in checkpoints:
        try:
            with _batch_progress(os.path.basename(checkpoint)) as callbacks:
                yield evaluate_checkpoint(
                    checkpoint, data.dataset, ema=ema, callbacks=callbacks, **keywords, **data.keywords
                )
        except (CheckpointError, FileNotFoundError) as error:
            # A file may be missing because a running job deletes old checkpoints.
            if len(checkpoints) == 1:
                raise
            yield _Failure(checkpoint, str(error))


def _model_init(run: _Run, data: EvaluationData) -> ModelInitT | None:
    """Return a function that builds the model, or None for the transformers model that a checkpoint describes."""
    section = run.configuration.model
    # A stored configuration could name any class of any module as model.auto_class. Pretrained weights would be loaded
    # only to be replaced.
    if not run.is_trusted or section.pretrained is not None:
        return None
    return model_builders.model_builder(section, data.tokenizer)


# --- output


class _BatchProgress(TrainerCallback):
    """Callback that advances a progress bar with each batch of an evaluation."""

    changes_control = False

    def __init__(self, progress: Progress, label: str) -> None:
        self._progress = progress
        self._task = progress.add_task(label, total=None)

    def on_prediction_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        eval_dataloader: object,
        **kwargs: object,
    ) -> None:
        self._progress.update(self._task, total=planned_eval_batches(state, eval_dataloader))
        self._progress.advance(self._task)


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Hide the messages of a logger, except warnings."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _batch_progress(label: str) -> Iterator[list[TrainerCallback]]:
    """Show the progress of an evaluation on stderr, on terminals only; yields the callbacks that the trainer needs."""
    console = Console(stderr=True)
    if not can_draw(console):
        yield []
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield [_BatchProgress(progress, printable(label))]


def _plain(result: CheckpointEvaluation | _Failure) -> dict[str, object]:
    data = dataclasses.asdict(result)
    return data | ({"perplexity": result.perplexity} if isinstance(result, CheckpointEvaluation) else {})


def _show_one(result: CheckpointEvaluation) -> None:
    show_row("checkpoint", result.checkpoint + (", averaged weights" if result.averaged else ""))
    show_row("step", None if result.step is None else str(result.step))
    show_row("loss", f"{result.loss:.6f}")
    show_row("perplexity", f"{result.perplexity:.4f}")
    show_row("data", f"{result.num_samples:,} samples, {result.num_tokens:,} target tokens")
    show_row("time", f"{result.seconds:.1f} s")
    for name, value in _other_metrics(result).items():
        show_row(name, _number(value))


def _show_table(results: Sequence[CheckpointEvaluation]) -> None:
    names = list(dict.fromkeys(name for one in results for name in _other_metrics(one)))
    columns = ["step", "loss", "perplexity", "samples", "tokens", *names, "checkpoint"]
    rows = [
        [
            one.step,
            f"{one.loss:.6f}",
            f"{one.perplexity:.4f}",
            f"{one.num_samples:,}",
            f"{one.num_tokens:,}",
            *(_number(_other_metrics(one).get(name)) for name in names),
            one.checkpoint,
        ]
        for one in results
    ]
    show_table(columns, rows, numeric=columns[:-1])


def _other_metrics(result: CheckpointEvaluation) -> dict[str, object]:
    """Return the metrics that have no row of their own: results of `compute_metrics`, and of named datasets."""
    return {name: value for name, value in result.metrics.items() if name not in _OWN_METRICS}


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)
