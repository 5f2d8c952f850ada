"""A run from its configuration to its last words."""

import os
from collections.abc import Sequence
from typing import Any

from forgather.cli import build, config_parsing, objects, yaml_files
from forgather.cli.closing import say_already_finished, say_finished, say_stopped
from forgather.cli.configuration import Configuration
from forgather.cli.job import Job
from forgather.cli.manners import show_own_messages
from forgather.cli.trainers import find_kind, load_trainer, make_own_keywords
from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.durable import make_directories, replace_file
from forgather.ml.checkpoint.output_lock import OutputDirLock
from forgather.ml.trainer.callbacks.console import get_console
from forgather.ml.trainer.signals import Preempted
from forgather.ml.trainer.trainer import Trainer
from forgather.ml.trainer.trainer_types import TrainerCallback

CONFIG_NAME = "config.yaml"


class ConfigurationInCheckpoints(TrainerCallback):
    """Puts the configuration of the run beside the state in each checkpoint."""

    def __init__(self, text: str) -> None:
        self._text = text

    def checkpoint_files(self) -> dict[str, bytes]:
        return {CONFIG_NAME: self._text.encode()}


def train(configuration: Configuration, demo_words: Sequence[str] | None = None) -> int:
    """Train as the configuration says; returns the exit code. `demo_words` are the options of the demo, if it is that."""
    trainer_class = load_trainer(configuration.trainer.kind)
    show_own_messages()
    with Job.joined(use_cpu=configuration.args.use_cpu) as job:
        finished_step = job.as_main_says(lambda: _step_of_finished_run(configuration.args), "looking for checkpoints")
        if finished_step is not None:
            if job.is_main:
                say_already_finished(configuration, finished_step, demo_words)
            return 0
        lock = OutputDirLock(configuration.args.output_dir)
        # Before anything is written there: a job that is refused must not change what the running one uses.
        job.as_main_says(lock.acquire, "taking the output directory")
        try:
            return _train(configuration, trainer_class, job, demo_words)
        finally:
            lock.release()


def _train(
    configuration: Configuration, trainer_class: type[Trainer], job: Job, demo_words: Sequence[str] | None
) -> int:
    text = yaml_files.dump(config_parsing.to_dict(configuration))
    trainer = build_trainer(configuration, trainer_class, text, job)
    job.one_per_node(lambda: _store_configuration(configuration, text), "storing the configuration")
    try:
        trainer.train()
    except Preempted as stop:
        if job.is_main:
            say_stopped(stop)
        return 0
    if job.is_main:
        say_finished(trainer, demo_words)
    return 0


def build_trainer(configuration: Configuration, trainer_class: type[Trainer], text: str, job: Job) -> Trainer:
    """The trainer with everything that it needs."""
    parts = job.one_per_node_first(lambda: _build_parts(configuration, trainer_class, text), "building the run")
    if job.is_main:
        _say_data(parts["train_dataset"], parts["eval_dataset"])
    keywords = make_own_keywords(configuration.trainer.kind, configuration.args)
    if job.environment is not None:
        keywords["distributed_env"] = job.environment
    return trainer_class(args=configuration.args, **parts, **keywords, **configuration.trainer.init_args)


def _build_parts(configuration: Configuration, trainer_class: type[Trainer], text: str) -> dict[str, Any]:
    """The keywords of the trainer; talks to no other rank."""
    keywords = dict.fromkeys(("args", *find_kind(configuration.trainer.kind).own_keywords))
    objects.check_keywords(trainer_class, {**keywords, **configuration.trainer.init_args}, "trainer", 0)
    tokenizer = build.build_tokenizer(configuration.tokenizer)
    parts: dict[str, Any] = {
        **build.build_stage_options(configuration.trainer),
        "model_init": build.model_builder(configuration.model, tokenizer),
        "optimizer_factory": objects.partial(configuration.optimizer, "optimizer"),
        "lr_scheduler_factory": objects.partial(configuration.lr_scheduler, "lr_scheduler"),
        "optimizer_groups": build.build_optimizer_groups(configuration.optimizer_groups),
        **build.build_loss(configuration.loss),
        "callbacks": [*build.build_callbacks(configuration), ConfigurationInCheckpoints(text)],
        "default_callbacks": configuration.trainer.default_callbacks,
    }
    # The data last: their tokens take longest.
    datasets = build.build_datasets(configuration.data, tokenizer, configuration.args.output_dir)
    return {**parts, "train_dataset": datasets.train, "eval_dataset": datasets.eval, "processing_class": tokenizer}


def _store_configuration(configuration: Configuration, text: str) -> None:
    make_directories(configuration.args.output_dir)
    replace_file(os.path.join(configuration.args.output_dir, CONFIG_NAME), text.encode())


def _step_of_finished_run(args: Any) -> int | None:
    """The step of the newest checkpoint, if it is where training would end and is to be resumed from."""
    if args.max_steps < 0 or args.resume_from_checkpoint is not True:
        return None
    found = store.find_checkpoints(os.path.join(args.output_dir, store.CHECKPOINTS_FOLDER))
    step = found[-1].manifest.step if found else None
    return step if step is not None and step >= args.max_steps else None


def _say_data(train_dataset: Any, eval_dataset: Any) -> None:
    from rich.text import Text

    description = build.describe_data(build.Datasets(train_dataset, eval_dataset))
    if description is not None:
        # In the style of the rows by which the run is summarised next.
        get_console().print(Text(f"{'data':<10} ", style="bold") + Text(description, style="default"), soft_wrap=True)
