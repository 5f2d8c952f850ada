"""A run from its configuration to its last words."""

import os
from collections.abc import Sequence
from typing import Any

from forgather.cli import build, config_parsing, objects, yaml_files
from forgather.cli.closing import say_already_finished, say_finished, say_stopped
from forgather.cli.configuration import Configuration
from forgather.cli.errors import UsageError, nearest_hint
from forgather.cli.manners import show_own_messages
from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.durable import make_directories, replace_file
from forgather.ml.trainer.callbacks.console import get_console
from forgather.ml.trainer.signals import Preempted
from forgather.ml.trainer.trainer import Trainer
from forgather.ml.trainer.trainer_types import TrainerCallback

CONFIG_NAME = "config.yaml"
TRAINERS: dict[str, type[Trainer]] = {"single": Trainer}
_PLANNED_TRAINERS = ("ddp", "accelerate", "pipeline", "hybrid", "fsdp2")


class ConfigurationInCheckpoints(TrainerCallback):
    """Puts the configuration of the run beside the state in each checkpoint."""

    def __init__(self, text: str) -> None:
        self._text = text

    def checkpoint_files(self) -> dict[str, bytes]:
        return {CONFIG_NAME: self._text.encode()}


def train(configuration: Configuration, demo_words: Sequence[str] | None = None) -> int:
    """Train as the configuration says; returns the exit code. `demo_words` are the options of the demo, if it is that."""
    trainer_class = find_trainer(configuration.trainer.kind)
    show_own_messages()
    finished_step = _step_of_finished_run(configuration.args)
    if finished_step is not None:
        say_already_finished(configuration, finished_step, demo_words)
        return 0
    text = yaml_files.dump(config_parsing.to_dict(configuration))
    trainer = build_trainer(configuration, trainer_class, text)
    make_directories(configuration.args.output_dir)
    replace_file(os.path.join(configuration.args.output_dir, CONFIG_NAME), text.encode())
    try:
        trainer.train()
    except Preempted as stop:
        say_stopped(stop)
        return 0
    say_finished(trainer, demo_words)
    return 0


def find_trainer(kind: str) -> type[Trainer]:
    """The trainer of that name."""
    if kind in TRAINERS:
        return TRAINERS[kind]
    available = f"this version has: {', '.join(TRAINERS)}"
    if kind in _PLANNED_TRAINERS:
        raise UsageError(f"trainer.kind={kind!r} is not available yet; {available}.")
    hint = nearest_hint(kind, [*TRAINERS, *_PLANNED_TRAINERS])
    raise UsageError(f"trainer.kind={kind!r}: there is no such trainer; {available}.{hint}")


def build_trainer(configuration: Configuration, trainer_class: type[Trainer], text: str) -> Trainer:
    """The trainer with everything that it needs."""
    objects.check_keywords(trainer_class, {"args": None, **configuration.trainer.init_args}, "trainer", 0)
    tokenizer = build.build_tokenizer(configuration.tokenizer)
    model_init = build.model_builder(configuration.model, tokenizer)
    parts: dict[str, Any] = {
        "optimizer_factory": objects.partial(configuration.optimizer, "optimizer"),
        "lr_scheduler_factory": objects.partial(configuration.lr_scheduler, "lr_scheduler"),
        "optimizer_groups": build.build_optimizer_groups(configuration.optimizer_groups),
        "compute_loss_func": build.build_loss(configuration.loss),
        "callbacks": [*build.build_callbacks(configuration), ConfigurationInCheckpoints(text)],
    }
    datasets = build.build_datasets(configuration.data, tokenizer, configuration.args.output_dir)
    _say_data(datasets)
    return trainer_class(
        args=configuration.args,
        model_init=model_init,
        train_dataset=datasets.train,
        eval_dataset=datasets.eval,
        processing_class=tokenizer,
        **parts,
        **configuration.trainer.init_args,
    )


def _step_of_finished_run(args: Any) -> int | None:
    """The step of the newest checkpoint, if it is where training would end and is to be resumed from."""
    if args.max_steps < 0 or args.resume_from_checkpoint is not True:
        return None
    found = store.find_checkpoints(os.path.join(args.output_dir, store.CHECKPOINTS_FOLDER))
    step = found[-1].manifest.step if found else None
    return step if step is not None and step >= args.max_steps else None


def _say_data(datasets: build.Datasets) -> None:
    from rich.text import Text

    description = build.describe_data(datasets)
    if description is not None:
        # In the style of the rows by which the run is summarised next.
        get_console().print(Text(f"{'data':<10} ", style="bold") + Text(description, style="default"), soft_wrap=True)
