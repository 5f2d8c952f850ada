"""Putting a model's files into a directory that is not theirs alone, such as a run's output directory."""

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
WEIGHT_FILE = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?$")


@dataclass(frozen=True)
class ModelExport:
    """One attempt; every rank holds an equal one, and one of them installs."""

    output_dir: str
    attempt: str

    @property
    def temporary_path(self) -> str:
        return os.path.join(self.output_dir, f"{_TEMPORARY}{self.attempt}")

    def begin(self, overwrite: bool) -> None:
        existing = self._weight_files()
        if existing and not overwrite:
            raise FileExistsError(
                f"{self.output_dir} already holds a model ({existing[0]}); pass overwrite_output_dir=True to replace it, or "
                "choose another directory."
            )
        durable.make_directories(self.temporary_path)

    def verify(self, weight_names: Mapping[str, Collection[str]]) -> None:
        """Raise unless the weight files that were written have the tensors that they are to have; contents are not read."""
        for file, names in weight_names.items():
            path = os.path.join(self.temporary_path, file)
            found = set(_names_in(path)) if os.path.exists(path) else set()
            lost = sorted(set(names) - found)
            if lost:
                raise CheckpointSaveError(
                    f"{file} was written without {len(lost)} of its tensors, such as {lost[0]}: the storage of "
                    f"{self.output_dir} lost them, or another process works in {self.temporary_path}. The model that was "
                    "there before is untouched; export again."
                )

    def install(self) -> None:
        """Move the files in, an index after its shards; then shards of an earlier model that were not replaced go."""
        new = sorted(durable.files_below(self.temporary_path), key=lambda name: (name.endswith(_INDEX_ENDING), name))
        directories = {self.output_dir}
        for name in new:
            target = os.path.join(self.output_dir, name)
            directories.add(os.path.dirname(target))
            durable.make_directories(os.path.dirname(target))
            os.replace(os.path.join(self.temporary_path, name), target)
        for directory in sorted(directories):
            durable.fsync_directory(directory)
        self._remove_stale(set(new))

    def clean_up(self) -> None:
        if os.path.isdir(self.temporary_path):
            durable.remove_or_warn(self.temporary_path)

    def _remove_stale(self, new: set[str]) -> None:
        """An index before its shards, or it would for an instant refer to files that are gone."""
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
    """Delete what an export that was killed left behind."""
    for name in sorted(os.listdir(output_dir)):
        path = os.path.join(output_dir, name)
        if _UNFINISHED.match(name) and is_real_directory(path):
            durable.remove_or_warn(path)
