"""Comparison of two runs: settings, then logs, then the checkpoints of common steps up to the first that differs.

Runs may have different trainers, topologies and lengths, and may still be running: only what both have is compared.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.errors import CheckpointCorruptError, CheckpointNotFoundError
from forgather.ml.checkpoint.files.layout import CHECKPOINT_PREFIX, checkpoints_root, counts_any_name, layout_of
from forgather.ml.trainer.callbacks.json_logger import FILE_NAME
from forgather.tools.checkpoints.listing import INCOMPLETE, list_checkpoints
from forgather.tools.comparison.checkpoint_comparison import CheckpointDifference, first_difference
from forgather.tools.comparison.logs import LogComparison, compare_logs
from forgather.tools.comparison.settings import SettingChange, changed_settings, flat_settings, read_settings

_KIND = "trainer.kind"
_LABELS = frozenset({"args.output_dir", "args.logging_dir", "args.run_name"})
"""Settings that name a run and change nothing in it."""


@dataclass(frozen=True)
class RunComparison:
    """Comparison of two runs in what both have."""

    settings: tuple[SettingChange, ...] | None
    """Settings that differ; None if a run has no stored configuration (it was started from Python)."""
    logs: LogComparison
    equal_checkpoints: tuple[int, ...]
    """Common steps whose checkpoints are equal, before the first that differs."""
    checkpoint: CheckpointDifference | None
    """The first common checkpoint that differs."""

    @property
    def are_equal(self) -> bool:
        return not self.settings and not self.logs.differences and self.checkpoint is None

    @property
    def has_evidence(self) -> bool:
        """Whether both runs have logs of the same steps, or checkpoints of the same steps."""
        return bool(self.logs.num_compared or self.equal_checkpoints or self.checkpoint)


def compare_runs(first_dir: str, second_dir: str) -> RunComparison:
    """Compare two output directories. Raises `CheckpointNotFoundError` for a path that is no output directory.

    Raises `CheckpointError` if the checkpoint of a common step is damaged.
    """
    for path in (first_dir, second_dir):
        _require_run(path)
    first, second = _checkpoints(first_dir), _checkpoints(second_dir)
    damaged = _damaged(first_dir, first) | _damaged(second_dir, second)
    equal, difference = [], None
    for step in sorted((first.keys() | damaged.keys()) & (second.keys() | damaged.keys())):
        if step in damaged:
            raise CheckpointCorruptError(damaged[step])
        try:
            difference = first_difference(first[step], second[step])
        except (CheckpointNotFoundError, FileNotFoundError):
            # The rotation of a running job has deleted one of them meanwhile.
            continue
        if difference is not None:
            break
        equal.append(step)
    return RunComparison(_changed(first_dir, second_dir), compare_logs(first_dir, second_dir), tuple(equal), difference)


def _require_run(path: str) -> None:
    if not os.path.isdir(path):
        kind = "it is a file" if os.path.exists(path) else "there is no such directory"
        raise CheckpointNotFoundError(f"{path!r} is not the output directory of a run: {kind}.")
    if not (os.path.isfile(os.path.join(path, FILE_NAME)) or _checkpoints(path)):
        raise CheckpointNotFoundError(
            f"{path!r} is not the output directory of a run: it has neither {FILE_NAME} nor complete checkpoints. Give the "
            "directory of args.output_dir."
        )


def _checkpoints(output_dir: str) -> dict[int, str]:
    """Return the paths of complete checkpoints by step."""
    layout = layout_of(output_dir)
    found = store.find_checkpoints(checkpoints_root(output_dir, layout), counts_any_name(layout))
    # The checkpoint of the run wins over its changed copies, such as checkpoint-10-modified.
    found.sort(key=lambda one: os.path.basename(one.path) == f"{CHECKPOINT_PREFIX}{one.manifest.step}")
    return {one.manifest.step: one.path for one in found if one.manifest.step is not None}


def _damaged(output_dir: str, complete: Mapping[int, str]) -> dict[int, str]:
    """Return a message by step for checkpoints that are not complete, such as with a truncated file.

    Saves and deletions in progress have other names, and do not count.
    """
    return {
        one.step: f"{one.path} is damaged, so the checkpoints of step {one.step} cannot be compared: {one.reason}."
        for one in list_checkpoints(output_dir).checkpoints
        if one.status == INCOMPLETE and one.step is not None and one.step not in complete
    }


def _changed(first_dir: str, second_dir: str) -> tuple[SettingChange, ...] | None:
    stored = [read_settings(path) for path in (first_dir, second_dir)]
    if stored[0] is None or stored[1] is None:
        return None
    first, second = (flat_settings(one) for one in stored if one is not None)
    changes = [one for one in changed_settings(first, second) if one.key not in _LABELS]
    if first.get(_KIND) == second.get(_KIND):
        return tuple(changes)
    # Arguments that only one of two trainers has are no choice of the user.
    return tuple(one for one in changes if not one.key.startswith("args.") or (one.key in first and one.key in second))
