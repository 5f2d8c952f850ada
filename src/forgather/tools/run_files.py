"""Files of a run as tools read them: complete checkpoints in the order of their steps, their states and configurations.

Reading takes no lock and writes nothing, so a run may train meanwhile.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.errors import CheckpointLoadError, CheckpointNotFoundError
from forgather.ml.checkpoint.files.layout import (
    CHECKPOINTS_FOLDER,
    IN_FOLDER,
    checkpoints_root,
    counts_any_name,
    layout_of,
)
from forgather.ml.checkpoint.files.state_files import read_state
from forgather.ml.checkpoint.manifest import CheckpointManifest
from forgather.ml.checkpoint.store import FoundCheckpoint

if TYPE_CHECKING:
    from forgather.config.schema import Configuration

_WHOLE_JOB = ("ddp", "fsdp2", "accelerate")
"""Trainers with a data-parallel rank in every process."""


@dataclass(frozen=True)
class RunFiles:
    """Output directory of a run, and its complete checkpoints in the order of their steps."""

    output_dir: str
    checkpoints: list[FoundCheckpoint]

    def before(self, step: int) -> FoundCheckpoint | None:
        """Return the newest checkpoint from before a step, which contains the state that the step began with."""
        return next((one for one in reversed(self.checkpoints) if step_of(one) < step), None)

    def after(self, step: int) -> FoundCheckpoint | None:
        """Return the oldest checkpoint that was saved at or after a step."""
        return next((one for one in self.checkpoints if step_of(one) >= step), None)

    def describing(self, step: int) -> FoundCheckpoint | None:
        """Return the checkpoint with the settings of a step: the next one, else the last."""
        # A run may have been resumed with other settings, or on other ranks. The next checkpoint knows them.
        return self.after(step) or self.before(step)

    def configuration(self, step: int, path: str | None = None) -> "tuple[Configuration, str]":
        """Return the configuration of a step, and the folder that it was found in; `path` names another file."""
        from forgather.config.stored import read_configuration
        from forgather.config.yaml_reader import CONFIG_NAME

        after, before = self.after(step), self.before(step)
        folders = [*([after.path] if after else []), self.output_dir, *([before.path] if before else [])]
        for folder in folders:
            found = read_configuration(folder, path)
            if found is not None:
                return found, folder
        raise FileNotFoundError(
            f"{self.output_dir} has no {CONFIG_NAME}, so its settings and data are unknown: it was started from Python, not "
            "by forgather train. Pass --config FILE, or call forgather.tools.samples or forgather.tools.replay from Python."
        )


def open_run(path: str) -> RunFiles:
    """Return the files of a run; `path` is its output directory, its folder of checkpoints, or one checkpoint."""
    path = os.path.abspath(path)
    if not os.path.isdir(path):
        kind = "it is a file" if os.path.exists(path) else "there is no such directory"
        raise CheckpointNotFoundError(
            f"{path!r} is not a run: {kind}. Give the output directory of a run, or a checkpoint such as "
            "out/checkpoints/checkpoint-100."
        )
    if store.is_complete(path):
        return RunFiles(_output_dir_of(path), [store.open_checkpoint(path)])
    is_folder = os.path.basename(path) == CHECKPOINTS_FOLDER
    layout = IN_FOLDER if is_folder else layout_of(path)
    root = path if is_folder else checkpoints_root(path, layout)
    found = [one for one in store.find_checkpoints(root, counts_any_name(layout)) if one.manifest.step is not None]
    return RunFiles(os.path.dirname(root) if is_folder else path, sorted(found, key=step_of))


def step_of(checkpoint: FoundCheckpoint) -> int:
    step = checkpoint.manifest.step
    if step is None:
        raise CheckpointLoadError(
            f"{checkpoint.path} has no step number in its manifest: it is no checkpoint of a trainer."
        )
    return step


def state_of(checkpoint: FoundCheckpoint, component: str) -> Any:
    """Return the state of a component, verified against its checksum; of the first rank if ranks have their own."""
    records = [record for record in checkpoint.manifest.files if record.component == component]
    if not records:
        raise CheckpointLoadError(f"{checkpoint.path} has no component {component!r}.")
    record = min(records, key=lambda one: one.owner or 0)
    return read_state(os.path.join(checkpoint.path, record.path), record)


def state_of_ranks(checkpoint: FoundCheckpoint, component: str) -> list[Any]:
    """Return the states of all ranks, in the order of ranks, for a component that each rank has its own of."""
    records = [record for record in checkpoint.manifest.files if record.component == component]
    ordered = sorted(records, key=lambda one: one.owner or 0)
    return [read_state(os.path.join(checkpoint.path, record.path), record) for record in ordered]


def num_data_parallel(kind: str, manifest: CheckpointManifest | None) -> int:
    """Return the number of data-parallel ranks of a trainer kind, from the manifest of a checkpoint of its run."""
    if kind in ("single", "pipeline"):
        return 1
    if manifest is None:
        raise CheckpointNotFoundError(
            f"The run has no complete checkpoint yet, so the number of ranks of its trainer ({kind}) is unknown. Wait for "
            "the first checkpoint."
        )
    if kind in _WHOLE_JOB:
        return manifest.world_size
    axes: Mapping[str, Any] = manifest.mesh or {}
    sizes = dict(zip(axes.get("axis_names", ()), axes.get("shape", ()), strict=False))
    if type(sizes.get("data_parallel")) is not int:
        raise CheckpointLoadError(f"The manifest of {manifest.checkpoint_path} has no mesh axis 'data_parallel'.")
    return int(sizes["data_parallel"])


def _output_dir_of(checkpoint: str) -> str:
    folder = os.path.dirname(checkpoint)
    return os.path.dirname(folder) if os.path.basename(folder) == CHECKPOINTS_FOLDER else folder
