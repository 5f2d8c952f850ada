"""Stored configuration of a run (config.yaml), and the list of changed settings when the run is resumed.

The file is replaced atomically in the output directory, and added to every checkpoint. `forgather finalize` reads it.
"""

import os
from collections.abc import Iterator, Mapping

from forgather.cli.config import parser, yaml_reader
from forgather.cli.config.schema import Configuration
from forgather.cli.work.job import Job
from forgather.ml.checkpoint.files.durable import make_directories, replace_file
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.callbacks.display import show_row
from forgather.ml.trainer.trainer_types import TrainerCallback, TrainerControl, TrainerState

CONFIG_NAME = "config.yaml"


class StoredConfiguration(TrainerCallback):
    """Callback that stores the configuration in the output directory when training begins, and in each checkpoint.

    Not earlier: a run that is rejected, or fails to load its checkpoint, must not replace the previous configuration.
    """

    changes_control = False

    def __init__(self, configuration: Configuration, job: Job) -> None:
        self._configuration = configuration
        self._text = yaml_reader.dump(parser.to_dict(configuration))
        self._job = job

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        # Only a resumed run has a configuration to compare with.
        if self._job.is_main and state.global_step > 0:
            self._show_changes()
        # Once per node: output directories may be on local disks.
        self._job.one_per_node(self._store, "storing the configuration")

    def checkpoint_files(self) -> dict[str, bytes]:
        return {CONFIG_NAME: self._text.encode()}

    def _store(self) -> None:
        folder = self._configuration.args.output_dir
        make_directories(folder)
        replace_file(os.path.join(folder, CONFIG_NAME), self._text.encode())

    def _show_changes(self) -> None:
        args = self._configuration.args
        folder = args.resume_from_checkpoint if isinstance(args.resume_from_checkpoint, str) else args.output_dir
        label = "changed"
        for change in describe_changes(_read(os.path.join(folder, CONFIG_NAME)), self._configuration):
            show_row(label, change)
            label = ""


def describe_changes(stored: object, configuration: Configuration) -> list[str]:
    """Return one line per setting that differs from the stored ones; missing settings count as defaults."""
    if not isinstance(stored, Mapping):
        return []
    # A setting that a newer version added is not listed as a change while it has its default.
    defaults = Configuration(args=type(configuration.args)())
    before = _flat(parser.to_dict(defaults)) | _flat(stored)
    now = _flat(parser.to_dict(configuration))
    return [
        f"{key}: {_shown(before.get(key))} -> {_shown(now.get(key))}"
        # Stored arguments that no longer exist belong to another trainer, and the change of trainer is listed itself.
        for key in [*now, *(key for key in _flat(stored) if key not in now and not key.startswith("args."))]
        if before.get(key) != now.get(key)
    ]


def _flat(data: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    return dict(_leaves(data, prefix))


def _leaves(data: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for name, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            # An empty mapping is equivalent to a missing key.
            yield f"{prefix}{name}", None if isinstance(value, Mapping) else value


def _shown(value: object) -> str:
    return "none" if value is None else str(value)


def _read(path: str) -> object:
    try:
        with open(path, encoding="utf-8") as file:
            return yaml_reader.load_value(file.read())
    except (OSError, UnicodeDecodeError):
        # Runs that were started from Python have no stored configuration.
        return None
