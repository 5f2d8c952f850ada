"""Stored configuration of a run (config.yaml), and the list of changed settings when the run is resumed.

The file is replaced atomically in the output directory, and added to every checkpoint. `forgather finalize` reads it.
"""

import os
from collections.abc import Mapping

from forgather.cli.work.job import Job
from forgather.config import parser, yaml_reader
from forgather.config.schema import Configuration
from forgather.config.yaml_reader import CONFIG_NAME
from forgather.ml.checkpoint.files.durable import make_directories, replace_file
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.callbacks.display import show_row
from forgather.ml.trainer.trainer_types import TrainerCallback, TrainerControl, TrainerState
from forgather.tools.comparison.settings import changed_settings, flat_settings, read_settings


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
        for change in describe_changes(read_settings(folder), self._configuration):
            show_row(label, change)
            label = ""


def describe_changes(stored: object, configuration: Configuration) -> list[str]:
    """Return one line per setting that differs from the stored ones; missing settings count as defaults."""
    if not isinstance(stored, Mapping):
        return []
    # A setting that a newer version added is not listed as a change while it has its default.
    defaults = Configuration(args=type(configuration.args)())
    before = flat_settings(parser.to_dict(defaults)) | flat_settings(stored)
    now = flat_settings(parser.to_dict(configuration))
    # Stored arguments that no longer exist belong to another trainer, and the change of trainer is listed itself.
    known = {key: value for key, value in before.items() if key in now or not key.startswith("args.")}
    return [str(change) for change in changed_settings(known, now)]
