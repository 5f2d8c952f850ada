"""Checkpoint and model directories: names, validation, the newest checkpoint, deletion, `from_pretrained` symlinks.

The manifest decides whether a Forgather checkpoint is complete. A directory without one is valid if it has weights: an
export, a Hugging Face model, or a checkpoint of another program. `forgather.ml.sharded_checkpoint` exports these
functions.
"""

import logging
import os
from collections.abc import Collection
from typing import TypedDict

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.errors import CheckpointError, CheckpointLoadError
from forgather.ml.checkpoint.files.durable import fsync_directory, make_directories, replace_file
from forgather.ml.checkpoint.files.eval_metrics import EVAL_METRICS_NAME, load_checkpoint_metrics, metrics_bytes
from forgather.ml.checkpoint.files.layout import checkpoints_root, counts_any_name, layout_of
from forgather.ml.checkpoint.files.regular_files import path_inside
from forgather.ml.checkpoint.manifest import FileRecord, has_versioned_manifest, read_manifest
from forgather.ml.checkpoint.weights.export import WEIGHT_FILE
from forgather.ml.checkpoint.weights.location import locate_weights

__all__ = [
    "CheckpointSummary",
    "create_pretrained_symlinks",
    "find_latest_checkpoint",
    "get_checkpoint_metadata",
    "maybe_delete_oldest_checkpoint",
    "next_checkpoint_path",
    "save_checkpoint_metrics",
    "validate_checkpoint",
]

logger = logging.getLogger(__name__)


class CheckpointSummary(TypedDict):
    """Description of a checkpoint directory, returned by `get_checkpoint_metadata`."""

    path: str
    step: int | None
    timestamp: float
    """Unix time of the commit of the checkpoint, or of the last change of the directory."""
    is_complete: bool
    has_manifest: bool
    """Whether a Forgather manifest lists the files; otherwise only the weights can be loaded."""
    world_size: int | None
    components: list[str]
    weight_files: list[str]
    metrics: dict[str, float] | None


def next_checkpoint_path(model_dir: str, id: str | int, checkpoint_layout: str | None = None) -> str:
    """Return the path for a model's checkpoint with the given id; by default in the layout of its checkpoints."""
    return store.checkpoint_path(model_dir, id, checkpoint_layout or layout_of(model_dir))


def find_latest_checkpoint(model_dir: str) -> str | None:
    """Return the newest valid checkpoint in `<model_dir>/checkpoints`, or else in `<model_dir>`, or None.

    Directories named `checkpoint-<step>` without a Forgather manifest count if they have weights. Checkpoints of
    Forgather in both places raise `CheckpointError`.
    """
    # By time of writing and not by step: a run that was restarted from an earlier step writes lower steps later.
    layout = layout_of(model_dir)
    root = checkpoints_root(model_dir, layout)
    own = store.find_checkpoints(root, counts_any_name(layout))
    found = [(one.manifest.written_at.timestamp(), one.path) for one in own]
    found += [(os.path.getmtime(path), path) for path in _directories_without_manifest(root)]
    if not found:
        found = [(os.path.getmtime(path), path) for path in _directories_without_manifest(model_dir)]
    return max(found)[1] if found else None


def _directories_without_manifest(root: str) -> list[str]:
    names = sorted(os.listdir(root)) if os.path.isdir(root) else []
    paths = [os.path.join(root, name) for name in names]
    named = [path for path in paths if store.step_of(path) is not None and os.path.isdir(path)]
    return [path for path in named if not has_versioned_manifest(path) and not _problem_with_weights(path)]


def validate_checkpoint(path: str) -> bool:
    """Return whether a directory is a complete checkpoint or has complete weights; log a warning if not."""
    problem = _problem_with(path)
    if problem:
        logger.warning("%s", problem)
    return not problem


def _problem_with(path: str) -> str:
    # A missing directory goes this way too: `open_checkpoint` has the message for it.
    if not os.path.isdir(path) or has_versioned_manifest(path):
        try:
            store.open_checkpoint(path)
        except CheckpointError as error:
            return str(error)
        return ""
    return _problem_with_weights(path)


def _problem_with_weights(path: str) -> str:
    try:
        location = locate_weights(path)
        for file in sorted(set(location.weight_map.values())):
            location.path_and_record(file)
    except (CheckpointError, OSError) as error:
        return str(error)
    return ""


def get_checkpoint_metadata(checkpoint_path: str) -> CheckpointSummary:
    """Return step, time, components, weight files and metrics of a checkpoint or model directory."""
    if not os.path.isdir(checkpoint_path):
        raise CheckpointLoadError(f"There is no checkpoint at {checkpoint_path}: no such directory.")
    # Another program may use the same file name for its manifest, so the content decides.
    manifest = read_manifest(checkpoint_path) if has_versioned_manifest(checkpoint_path) else None
    step = store.step_of(checkpoint_path)
    return CheckpointSummary(
        path=checkpoint_path,
        step=step if manifest is None or manifest.step is None else manifest.step,
        timestamp=os.path.getmtime(checkpoint_path) if manifest is None else manifest.written_at.timestamp(),
        is_complete=not _problem_with(checkpoint_path),
        has_manifest=manifest is not None,
        world_size=None if manifest is None else manifest.world_size,
        components=[] if manifest is None else sorted(manifest.components),
        weight_files=_weight_files(checkpoint_path),
        metrics=load_checkpoint_metrics(checkpoint_path),
    )


def _weight_files(path: str) -> list[str]:
    return sorted(name for name in os.listdir(path) if WEIGHT_FILE.match(name))


def save_checkpoint_metrics(checkpoint_path: str, metrics: dict[str, float]) -> str:
    """Write evaluation metrics into a checkpoint directory, created if missing; return the path of the file."""
    data = metrics_bytes(metrics)
    path = os.path.join(checkpoint_path, EVAL_METRICS_NAME)
    # The manifest lists every file with its checksum, so it must be updated together with the file.
    if has_versioned_manifest(checkpoint_path):
        store.amend_file(checkpoint_path, FileRecord(EVAL_METRICS_NAME, 0, "", 0, "metadata"), data)
    else:
        make_directories(os.path.abspath(checkpoint_path))
        replace_file(path, data)
    return path


def maybe_delete_oldest_checkpoint(
    model_dir: str,
    max_checkpoints: int | None,
    preserved_checkpoints: Collection[str] = (),
    best_checkpoint: str | None = None,
) -> list[str]:
    """Delete the oldest checkpoints beyond `max_checkpoints` (None or 0: no limit); return their paths.

    `preserved_checkpoints` and `best_checkpoint` are always kept and do not count. Only complete checkpoints with a
    Forgather manifest are deleted.
    """
    if not max_checkpoints or max_checkpoints < 0:
        return []
    preserved = [*preserved_checkpoints, *([] if best_checkpoint is None else [best_checkpoint])]
    # Resolved, because the caller may pass relative paths or symlinks.
    kept = {os.path.realpath(path) for path in preserved}
    layout = layout_of(model_dir)
    found = store.find_checkpoints(checkpoints_root(model_dir, layout), counts_any_name(layout))
    candidates = [one.path for one in found if os.path.realpath(one.path) not in kept]
    surplus = candidates[:-max_checkpoints]
    for path in surplus:
        store.delete_checkpoint(path)
    return surplus


def create_pretrained_symlinks(model_dir: str, path: str | None = None) -> list[str]:
    """Link the weight files of a checkpoint (default: the newest) into `model_dir` for `from_pretrained`.

    The symlinks are relative. They replace symlinks of an earlier call, but never a real weight file. Returns the
    symlinks.
    """
    source = path or find_latest_checkpoint(model_dir)
    if source is None:
        raise CheckpointLoadError(f"There is no checkpoint in {model_dir} to link to. Save one, or pass its path.")
    problem = _problem_with_weights(source)
    if problem:
        raise CheckpointLoadError(f"The weights of {source} cannot be linked: {problem}")
    _refuse_real_files(model_dir)
    names = _weight_files(source)
    # Remove all old symlinks first: `from_pretrained` must not combine an old index with new shards.
    for name in _weight_files(model_dir):
        os.remove(os.path.join(model_dir, name))
    # Relative, so that the links remain valid when the model directory is moved with its checkpoints.
    for name in names:
        os.symlink(os.path.relpath(path_inside(source, name), model_dir), os.path.join(model_dir, name))
    fsync_directory(model_dir)
    return [os.path.join(model_dir, name) for name in names]


def _refuse_real_files(model_dir: str) -> None:
    real = [name for name in _weight_files(model_dir) if not os.path.islink(os.path.join(model_dir, name))]
    if real:
        raise FileExistsError(
            f"{model_dir} has real weight files ({', '.join(real)}), which symlinks never replace. Remove them, or choose "
            "another directory."
        )
