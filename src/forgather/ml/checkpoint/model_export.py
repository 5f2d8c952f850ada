"""Putting a model's files into a directory that is not theirs alone, such as a run's output directory."""

import os
import re
from dataclasses import dataclass

from forgather.ml.checkpoint import durable

_TEMPORARY = ".tmp-model-"
_WEIGHT_FILE = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?$")


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

    def install(self) -> None:
        """Move the files in: an index after its shards, and shards of an earlier model that are not replaced go."""
        new = sorted(durable.files_below(self.temporary_path), key=lambda name: (name.endswith(".index.json"), name))
        for name in self._weight_files():
            if name not in new:
                os.remove(os.path.join(self.output_dir, name))
        for name in new:
            target = os.path.join(self.output_dir, name)
            durable.make_directories(os.path.dirname(target))
            os.replace(os.path.join(self.temporary_path, name), target)
        durable.fsync_directory(self.output_dir)

    def clean_up(self) -> None:
        if os.path.isdir(self.temporary_path):
            durable.remove_tree(self.temporary_path)

    def _weight_files(self) -> list[str]:
        names = os.listdir(self.output_dir) if os.path.isdir(self.output_dir) else []
        return sorted(name for name in names if _WEIGHT_FILE.match(name))


def remove_unfinished_exports(output_dir: str) -> None:
    """Delete what an export that was killed left behind."""
    for name in os.listdir(output_dir):
        if name.startswith(_TEMPORARY):
            durable.remove_tree(os.path.join(output_dir, name))
