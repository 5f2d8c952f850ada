"""Work of `forgather train`: builds the trainer from a parsed configuration, trains, and prints the summary.

Every rank executes this code. The output directory is locked before anything is written to it.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from forgather.cli.errors import RunAborted
from forgather.cli.launch.run_notes import note_preempted
from forgather.cli.process_setup import show_own_messages
from forgather.cli.work.job import Job
from forgather.cli.work.spares import Layout
from forgather.cli.work.stored_configuration import StoredConfiguration
from forgather.cli.work.summary import say_already_finished, say_finished, say_stopped
from forgather.config import builders, class_paths, data_builders, model_builders
from forgather.config.schema import Configuration
from forgather.config.trainer_kinds import find_kind, load_trainer, make_own_keywords
from forgather.data.packed import PackedTokens
from forgather.data.token_store import TextTokenizer
from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.files.layout import checkpoints_root, counts_any_name, refuse_other_place
from forgather.ml.checkpoint.output_lock import OutputDirLock
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.callbacks.display import show_row
from forgather.ml.trainer.elastic.preemption_mark import remove_mark
from forgather.ml.trainer.loop.signals import CONTROL_STOP, Aborted, Preempted
from forgather.ml.trainer.trainer import Trainer

logger = logging.getLogger(__name__)


def train(configuration: Configuration, demo_words: Sequence[str] | None = None) -> int:
    """Train as configured; returns the exit code. `demo_words` are the options of the demo, or None."""
    layout = Layout(configuration)
    if layout.is_spare:
        layout.wait_as_spare()
        return 0
    layout.leave_out_spares()
    trainer_class = load_trainer(configuration.trainer.kind)
    show_own_messages()
    with Job.joined(use_cpu=configuration.args.use_cpu) as job, layout.releasing_spares():
        # Rank 0 decides, since all ranks must take the same branch.
        finished_step = job.as_main_says(lambda: _step_of_finished_run(configuration.args), "looking for checkpoints")
        if finished_step is not None:
            if job.is_main:
                # The last preemption may have saved the last step; a batch script must not start the job again.
                remove_mark(configuration.args.output_dir)
                say_already_finished(configuration, finished_step, demo_words)
            return 0
        lock = OutputDirLock(configuration.args.output_dir)
        # Lock before anything is written: a rejected job must not change files of the running one.
        job.as_main_says(lock.acquire, "locking the output directory")
        try:
            return _train(configuration, trainer_class, job, demo_words)
        finally:
            lock.release()


def _train(
    configuration: Configuration, trainer_class: type[Trainer[Any]], job: Job, demo_words: Sequence[str] | None
) -> int:
    trainer = build_trainer(configuration, trainer_class, job)
    try:
        trainer.train()
    except Preempted as stop:
        if stop.signal_name != CONTROL_STOP:
            # The launcher of an elastic job restarts after a signal, but not after a request to stop the job.
            note_preempted()
        if job.is_main:
            say_stopped(stop)
        return 0
    except Aborted as stop:
        raise RunAborted(f"{stop}.") from None
    if job.is_main:
        say_finished(trainer, demo_words)
    return 0


def build_trainer(configuration: Configuration, trainer_class: type[Trainer[Any]], job: Job) -> Trainer[Any]:
    """Return the trainer with model, data, loss, optimizer and callbacks."""
    # The first rank of a node writes the token files, which the others then find.
    parts = job.one_per_node_first(lambda: _build_parts(configuration, trainer_class, job), "building the run")
    if job.is_main:
        _say_data(parts)
    keywords = make_own_keywords(configuration.trainer.kind, configuration.args)
    if job.environment is not None:
        keywords["distributed_env"] = job.environment
    return trainer_class(args=configuration.args, **parts, **keywords, **configuration.trainer.init_args)


def _build_parts(configuration: Configuration, trainer_class: type[Trainer[Any]], job: Job) -> dict[str, Any]:
    """Return the keyword arguments of the trainer; does not communicate with other ranks."""
    # Check trainer.init_args before anything slow is built; the keys stand for arguments that are passed later.
    keywords = dict.fromkeys(("args", *find_kind(configuration.trainer.kind).own_keywords))
    class_paths.check_keywords(trainer_class, {**keywords, **configuration.trainer.init_args}, "trainer", 0)
    tokenizer = builders.build_tokenizer(configuration.tokenizer)
    callbacks = [*builders.build_callbacks(configuration), StoredConfiguration(configuration, job)]
    parts: dict[str, Any] = {
        **builders.build_stage_options(configuration.trainer),
        "model_init": model_builders.model_builder(configuration.model, tokenizer),
        "optimizer_factory": class_paths.partial(configuration.optimizer, "optimizer"),
        "lr_scheduler_factory": class_paths.partial(configuration.lr_scheduler, "lr_scheduler"),
        "optimizer_groups": builders.build_optimizer_groups(configuration.optimizer_groups),
        **builders.build_loss(configuration.loss),
        "callbacks": callbacks,
        "default_callbacks": configuration.trainer.default_callbacks,
    }
    # The data last: tokenising takes longest, and mistakes in other sections should be reported first.
    if configuration.data.class_path is None:
        _check_positions(configuration, tokenizer, job)
    datasets = data_builders.build_datasets(configuration.data, tokenizer, configuration.args)
    if configuration.data.class_path is not None and isinstance(datasets.train, PackedTokens):
        # A callable may return datasets that have another length.
        _check_positions(configuration, tokenizer, job)
    return {**parts, "train_dataset": datasets.train, "eval_dataset": datasets.eval, "processing_class": tokenizer}


def _check_positions(configuration: Configuration, tokenizer: TextTokenizer, job: Job) -> None:
    length = configuration.data.sequence_length
    warning = model_builders.check_positions(configuration.model, tokenizer, length)
    if warning is not None and job.is_main:
        logger.warning("%s", warning)


def _step_of_finished_run(args: TrainingArguments) -> int | None:
    """Return the step of the newest checkpoint if the run would resume from it and it has reached max_steps."""
    if args.max_steps < 0 or args.resume_from_checkpoint is not True:
        return None
    refuse_other_place(args.output_dir, args.checkpoint_layout)
    root = checkpoints_root(args.output_dir, args.checkpoint_layout)
    found = store.find_checkpoints(root, counts_any_name(args.checkpoint_layout))
    step = found[-1].manifest.step if found else None
    return step if step is not None and step >= args.max_steps else None


def _say_data(parts: Mapping[str, Any]) -> None:
    show_row("data", data_builders.describe_data(parts["train_dataset"]))
    show_row("eval data", data_builders.describe_data(parts["eval_dataset"]))
