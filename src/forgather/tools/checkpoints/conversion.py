"""Import of a checkpoint of another program as a complete Forgather checkpoint, in one process.

A trainer loads the foreign directory, as `resume_from_checkpoint` does, and saves a checkpoint that every trainer
resumes. The state that cannot be imported is listed. The foreign directory is never changed.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.errors import CheckpointLoadError, CheckpointNotFoundError
from forgather.ml.checkpoint.foreign.importing import DATASET
from forgather.ml.checkpoint.foreign.ownership import Owner, owner_of
from forgather.ml.checkpoint.foreign.report import ImportReport
from forgather.ml.checkpoint.manager import CheckpointManager
from forgather.ml.checkpoint.reader import RNG_KEY
from forgather.ml.finalize import model_of_transformers
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.trainer import Trainer
from forgather.ml.trainer.trainer_types import TrainerCallback

_SAVED = ["model", "optimizer", "scheduler", "trainer"]
_NOT_SAVED = {
    DATASET: "the resumed run starts at the beginning of the epoch, in its own order",
    RNG_KEY: "random state starts from the seed of the resumed run",
}


@dataclass(frozen=True)
class ImportedCheckpoint:
    """The new checkpoint, and what was imported."""

    source: str
    owner: Owner
    path: str
    step: int
    taken: tuple[str, ...]
    left_out: Mapping[str, str]
    """State that was not imported, with the reason."""


def require_importable(path: str) -> Owner:
    """Return the program that wrote a directory; raise `CheckpointLoadError` if it cannot be imported."""
    if not os.path.isdir(path):
        kind = "it is a file" if os.path.lexists(path) else "there is no such directory"
        raise CheckpointNotFoundError(f"{path!r} cannot be imported: {kind}. Give the directory of one checkpoint.")
    owner = owner_of(path)
    if owner is Owner.OURS:
        raise CheckpointLoadError(f"{path} is a Forgather checkpoint already: resume from it, or copy it.")
    if owner is Owner.UNKNOWN:
        raise CheckpointNotFoundError(
            f"{path} is not recognised as a checkpoint of transformers, accelerate or torch.distributed.checkpoint, nor as "
            "a directory of Hugging Face weights."
        )
    return owner


def import_as_checkpoint(
    path: str,
    output_dir: str,
    model_init: Callable[[], nn.Module] | None = None,
    args: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
    **trainer_options: Any,
) -> ImportedCheckpoint:
    """Import a foreign checkpoint into `<output_dir>/checkpoints/checkpoint-<step>`, where auto-resume finds it.

    `model_init` builds the model; None builds the one in the directory's config.json. `args` are training arguments and
    `trainer_options` further options of `Trainer`, such as `optimizer_factory`: they decide which optimizer and schedule
    the state is imported into. `files` are small files to store with it. Raise `CheckpointLoadError` if the weights
    cannot be imported, `FileExistsError` if the output directory has checkpoints.
    """
    owner = require_importable(path)
    _refuse_run(output_dir)
    make = functools.partial(
        Trainer[TrainingArguments],
        model_init=model_init or (lambda: model_of_transformers(path)),
        # Only the number of steps per epoch depends on it, and the resumed run counts them again.
        train_dataset=[{}],
        callbacks=[_StoredFiles(files or {})],
        default_callbacks=False,
        **trainer_options,
    )
    arguments = {**(args or {}), **_own_arguments(output_dir)}
    with _loaded(make(args=arguments), path) as trainer:
        report = _report_of(trainer)
    # State that was not imported would be that of a new run with these arguments. The resumed run begins it afresh.
    arguments["checkpoint_components"] = [key for key in _SAVED if key not in report.left_out]
    with _loaded(make(args=arguments), path) as trainer:
        saved, step = trainer.save_checkpoint(), trainer.state.global_step
    return ImportedCheckpoint(path, owner, saved, step, report.taken, {**_NOT_SAVED, **report.left_out})


@contextlib.contextmanager
def _loaded(trainer: Trainer[TrainingArguments], path: str) -> Iterator[Trainer[TrainingArguments]]:
    """Load a foreign checkpoint into a trainer, and release its output directory at the end."""
    try:
        trainer.load_checkpoint(os.path.abspath(path))
        yield trainer
    finally:
        if trainer.checkpoint_manager is not None:
            trainer.checkpoint_manager.close()


def _own_arguments(output_dir: str) -> dict[str, Any]:
    return {
        "output_dir": output_dir,
        "use_cpu": True,
        "checkpoint_components": _SAVED,
        "checkpoint_layout": "checkpoints",
        "async_save": False,
        "eval_strategy": "no",
    }


def _refuse_run(output_dir: str) -> None:
    """Raise unless the output directory is new or has no checkpoints: an import must not continue another run."""
    if os.path.lexists(output_dir) and not os.path.isdir(output_dir):
        raise FileExistsError(f"{output_dir} exists and is not a directory. Choose another directory.")
    folder = os.path.join(output_dir, store.CHECKPOINTS_FOLDER)
    if os.path.isdir(folder) and os.listdir(folder):
        raise FileExistsError(f"{output_dir} has checkpoints already. Choose a new output directory for the import.")


def _report_of(trainer: Trainer[Any]) -> ImportReport:
    manager = trainer.checkpoint_manager
    assert isinstance(manager, CheckpointManager) and manager.import_report is not None
    return manager.import_report


class _StoredFiles(TrainerCallback):
    """Callback that adds small files, such as config.yaml, to the checkpoint."""

    changes_control = False

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = dict(files)

    def checkpoint_files(self) -> dict[str, bytes]:
        return self._files
