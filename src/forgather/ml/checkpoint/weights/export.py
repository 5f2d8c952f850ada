"""Model export into a directory that may contain other files, such as the output directory of a run.

Files are written to a temporary directory, verified, and moved by atomic renames, so that a failed write leaves an
earlier model untouched. The checkpoint coordinator and `save_checkpoint` use it.
"""

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from forgather.ml.checkpoint.errors import CheckpointSaveError
from forgather.ml.checkpoint.files import durable
from forgather.ml.checkpoint.files.regular_files import is_real_directory
from forgather.ml.checkpoint.files.state_files import read_weight_names
from forgather.ml.checkpoint.weights.safetensors_io import read_header

_TEMPORARY = ".tmp-model-"
_UNFINISHED = re.compile(re.escape(_TEMPORARY) + r"[0-9a-f]{12}$")
_INDEX_ENDING = ".index.json"
# Both formats, because `from_pretrained` prefers safetensors: an export as .bin must remove old safetensors files.
WEIGHT_FILE = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?$")


@dataclass(frozen=True)
class ModelExport:
    """One attempt to export a model; all ranks hold equal objects, and one rank installs the files."""

    output_dir: str
    attempt: str

    @property
    def temporary_path(self) -> str:
        # Inside the output directory, because a rename is atomic only within one file system.
        return os.path.join(self.output_dir, f"{_TEMPORARY}{self.attempt}")

    def begin(self, overwrite: bool) -> None:
        existing = self._weight_files()
        if existing and not overwrite:
            raise FileExistsError(
                f"{self.output_dir} already contains a model ({existing[0]}). Pass overwrite_output_dir=True to replace it, "
                "or choose another directory."
            )
        durable.make_directories(self.temporary_path)

    def verify(self, weight_names: Mapping[str, Collection[str]]) -> None:
        """Raise unless the written weight files contain their planned tensors; only names are read, not contents."""
        # Network storage may lose writes without an error, and the next step replaces the existing model.
        for file, names in weight_names.items():
            path = os.path.join(self.temporary_path, file)
            found = set(_names_in(path)) if os.path.exists(path) else set()
            lost = sorted(set(names) - found)
            if lost:
                raise CheckpointSaveError(
                    f"{file} was written without {len(lost)} of its tensors, such as {lost[0]}: the storage of "
                    f"{self.output_dir} lost them, or another process writes to {self.temporary_path}. An existing model is "
                    "unchanged. Export again."
                )

    def install(self) -> None:
        """Move the files into the output directory, then remove stale weight files of an earlier model."""
        # An index is moved after its shards, so that it never refers to a missing shard.
        new = sorted(durable.files_below(self.temporary_path), key=lambda name: (name.endswith(_INDEX_ENDING), name))
        directories = {self.output_dir}
        for name in new:
            target = os.path.join(self.output_dir, name)
            directories.add(os.path.dirname(target))
            durable.make_directories(os.path.dirname(target))
            os.replace(os.path.join(self.temporary_path, name), target)
        # The renames must be on disk before old shards are deleted, or a crash could lose both models.
        for directory in sorted(directories):
            durable.fsync_directory(directory)
        self._remove_stale(set(new))

    def clean_up(self) -> None:
        if os.path.isdir(self.temporary_path):
            durable.remove_or_warn(self.temporary_path)

    def _remove_stale(self, new: set[str]) -> None:
        """Remove weight files of an earlier model that were not replaced."""
        # A stale index is removed before its shards, so that it never refers to deleted files.
        stale = [name for name in self._weight_files() if name not in new]
        indices = [name for name in stale if name.endswith(_INDEX_ENDING)]
        for names in (indices, [name for name in stale if name not in indices]):
            for name in names:
                os.remove(os.path.join(self.output_dir, name))
            if names:
                durable.fsync_directory(self.output_dir)

    def _weight_files(self) -> list[str]:
        names = os.listdir(self.output_dir) if os.path.isdir(self.output_dir) else []
        return sorted(name for name in names if WEIGHT_FILE.match(name))


def _names_in(path: str) -> Collection[str]:
    return read_header(path).tensors if path.endswith(".safetensors") else read_weight_names(path)


def remove_unfinished_exports(output_dir: str) -> None:
    """Delete temporary directories of killed exports."""
    for name in sorted(os.listdir(output_dir)):
        path = os.path.join(output_dir, name)
        # A symlink with such a name was not created by an export, and deleting must not follow it.
        if _UNFINISHED.match(name) and is_real_directory(path):
            durable.remove_or_warn(path)
