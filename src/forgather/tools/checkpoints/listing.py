"""Listing of the checkpoints of a run: complete or why not, newest, best, and after which of them the run died.

Both layouts of an output directory are listed. Directories that no resume takes are listed too, with the reason: an
interrupted save, a damaged checkpoint, a checkpoint of another program. Nothing is changed.
"""

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.errors import CheckpointError, CheckpointNotFoundError
from forgather.ml.checkpoint.files.eval_metrics import load_checkpoint_metrics
from forgather.ml.checkpoint.files.layout import CHECKPOINT_PREFIX, CHECKPOINTS_FOLDER
from forgather.ml.checkpoint.files.regular_files import is_real_directory
from forgather.ml.checkpoint.foreign.ownership import SET_ASIDE, Owner, owner_of
from forgather.ml.checkpoint.manifest import MANIFEST_NAME, CheckpointManifest, read_manifest
from forgather.ml.checkpoint.metadata import CheckpointMetadata
from forgather.ml.trainer.elastic.failure_notes import Failure, read_failures

COMPLETE, INCOMPLETE, TEMPORARY, FOREIGN, LINK, SET_ASIDE_STATUS = (
    "complete",
    "incomplete",
    "temporary",
    "foreign",
    "link",
    "set aside",
)
_LEFTOVERS = {
    "tmp": "files of a save that was killed or is still running; the next start of the run removes them",
    "old": "a checkpoint that was being replaced; the next start of the run finishes the replacement",
    "trash": "a checkpoint that was being deleted; the next start of the run removes it",
}
_LOSS = "eval_loss"


@dataclass(frozen=True)
class ListedCheckpoint:
    """One directory of a run that is a checkpoint, was one, or has the name of one."""

    path: str
    status: str
    """"complete", "incomplete", "temporary", "foreign", "link" or "set aside"; only complete ones are resumed."""
    reason: str | None = None
    """Why it is not complete; None for a complete checkpoint."""
    size_bytes: int = 0
    """Size of its files on disk."""
    step: int | None = None
    time: str | None = None
    """Time of the commit, ISO 8601."""
    trainer: str | None = None
    world_size: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_newest: bool = False
    """Whether auto-resume takes this checkpoint."""
    best_rank: int | None = None
    """1 for the best checkpoint, 2 for the second best; None if it is not ranked."""
    failures: Sequence[Failure] = ()
    """Failures of the run for which this was the last checkpoint."""

    @property
    def name(self) -> str:
        return os.path.basename(os.path.normpath(self.path))


@dataclass(frozen=True)
class Listing:
    """Checkpoints of a run, oldest first; directories that are no complete checkpoints come last."""

    path: str
    output_dir: str
    checkpoints: Sequence[ListedCheckpoint]
    best_metric: str | None = None
    """Metric of the marks "best"; None without a ranking."""


def list_checkpoints(path: str) -> Listing:
    """Return the checkpoints below a path: an output directory, its folder of checkpoints, or one checkpoint.

    Raise `CheckpointNotFoundError` if the path is not a directory.
    """
    if not os.path.isdir(path):
        kind = "it is a file" if os.path.lexists(path) else "there is no such directory"
        raise CheckpointNotFoundError(
            f"{path!r} has no checkpoints: {kind}. Give the output directory of a run, its folder of checkpoints, or one "
            "checkpoint."
        )
    if looks_like_checkpoint(path):
        root = os.path.dirname(os.path.abspath(path))
        output_dir = output_dir_of(path)
        found = _marked(_described_in(root), output_dir)
        own = [one for one in found[0] if os.path.realpath(one.path) == os.path.realpath(path)]
        described = own or _described(path)
        if not described:
            raise CheckpointNotFoundError(f"There is no checkpoint at {path!r}: its run has just deleted it.")
        return Listing(path, output_dir, described, found[1])
    output_dir, folders = _folders(path)
    checkpoints = [one for folder in folders for one in _described_in(folder)]
    marked, metric = _marked(checkpoints, output_dir)
    return Listing(path, output_dir, marked, metric)


def looks_like_checkpoint(path: str) -> bool:
    """Return whether a directory is, or was meant to be, one checkpoint rather than a folder of them."""
    if os.path.lexists(os.path.join(path, MANIFEST_NAME)) or store.step_of(path) is not None:
        return True
    has_inner = bool(_names_in(path)) or os.path.isdir(os.path.join(path, CHECKPOINTS_FOLDER))
    return not has_inner and owner_of(path) is not Owner.UNKNOWN


def output_dir_of(checkpoint: str) -> str:
    """Return the output directory of a checkpoint, in either layout."""
    folder = os.path.dirname(os.path.abspath(checkpoint))
    return os.path.dirname(folder) if os.path.basename(folder) == CHECKPOINTS_FOLDER else folder


def _folders(path: str) -> tuple[str, list[str]]:
    if os.path.basename(os.path.abspath(path)) == CHECKPOINTS_FOLDER:
        return os.path.dirname(os.path.abspath(path)), [path]
    # Both layouts: a resume refuses such a run, and a listing shows why.
    inner = os.path.join(path, CHECKPOINTS_FOLDER)
    return path, [folder for folder in (inner, path) if os.path.isdir(folder)]


def _names_in(folder: str) -> list[str]:
    """Return the names in a folder that are listed: checkpoints, and what interrupted saves left."""
    is_inner = os.path.basename(os.path.abspath(folder)) == CHECKPOINTS_FOLDER
    return [
        name
        for name in _entries(folder)
        if name.startswith(CHECKPOINT_PREFIX)
        or _leftover(name) is not None
        # As `store.find_checkpoints`: users may give checkpoints any name in this folder.
        or (is_inner and os.path.lexists(os.path.join(folder, name, MANIFEST_NAME)))
    ]


def _entries(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        # A checkpoint that its run has just deleted.
        return []


def _leftover(name: str) -> str | None:
    """Return "tmp", "old" or "trash" for the name of a directory that an interrupted save or deletion left."""
    match = store.LEFTOVER.match(name)
    return match["kind"] if match is not None and match["name"].startswith(CHECKPOINT_PREFIX) else None


def _described_in(folder: str) -> list[ListedCheckpoint]:
    paths = (os.path.join(folder, name) for name in _names_in(folder))
    return [one for path in paths if os.path.isdir(path) or os.path.islink(path) for one in _described(path)]


def _described(path: str) -> list[ListedCheckpoint]:
    """Return a checkpoint without the marks that depend on other checkpoints; none if its run has just deleted it."""
    listed = _described_now(path)
    return [listed] if listed is not None and os.path.lexists(path) else []


def _described_now(path: str) -> ListedCheckpoint | None:
    kind = _leftover(os.path.basename(path))
    if os.path.islink(path.rstrip(os.sep)):
        target = os.path.realpath(path)
        return ListedCheckpoint(path, LINK, f"a symbolic link to {target}, which a resume does not follow")
    size = size_on_disk(path)
    if kind is not None:
        return ListedCheckpoint(path, TEMPORARY, _LEFTOVERS[kind], size)
    if SET_ASIDE.match(os.path.basename(path)):
        return ListedCheckpoint(path, SET_ASIDE_STATUS, "a save found it damaged and set it aside", size)
    try:
        manifest = store.open_checkpoint(path).manifest
    except CheckpointNotFoundError:
        return None
    except (CheckpointError, OSError) as error:
        return _broken(path, size, error)
    return _with_manifest(ListedCheckpoint(path, COMPLETE, size_bytes=size), manifest)


def _broken(path: str, size: int, error: Exception) -> ListedCheckpoint:
    owner = owner_of(path)
    if owner.is_other_program:
        return ListedCheckpoint(path, FOREIGN, owner.value, size, step=store.step_of(path))
    listed = ListedCheckpoint(path, INCOMPLETE, _reason(path, error), size, step=store.step_of(path))
    try:
        return _with_manifest(listed, read_manifest(path))
    except (CheckpointError, OSError):
        # The reason says already that the manifest is missing or damaged.
        return listed


def _reason(path: str, error: Exception) -> str:
    text = str(error)
    for prefix in (f"{path} is not complete: ", f"{path} is not a complete checkpoint: "):
        text = text.replace(prefix, "")
    return without_path(text, path).rstrip(".")


def without_path(text: str, checkpoint: str) -> str:
    """Return a message with paths relative to the checkpoint, for output that prints its path once."""
    # The absolute path first: it contains a relative one.
    for folder in (os.path.abspath(checkpoint), checkpoint):
        text = text.replace(os.path.join(folder, ""), "")
    return text


def _with_manifest(listed: ListedCheckpoint, manifest: CheckpointManifest) -> ListedCheckpoint:
    return replace(
        listed,
        step=manifest.step,
        time=manifest.written_at.isoformat(),
        trainer=manifest.trainer_class,
        world_size=manifest.world_size,
        metrics=_metrics_of(listed.path),
    )


def _metrics_of(path: str) -> dict[str, float]:
    try:
        metrics = load_checkpoint_metrics(path) or {}
    except (CheckpointError, OSError):
        # Users edit this file, and a resume does not need it. `verify` reports it.
        return {}
    return {name: value for name, value in metrics.items() if type(value) in (int, float)}


def size_on_disk(path: str) -> int:
    """Return the sum of the sizes of the files below a directory; symlinks are not followed."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            # A save or deletion may remove the file meanwhile.
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


# --- marks


def _marked(checkpoints: Iterable[ListedCheckpoint], output_dir: str) -> tuple[list[ListedCheckpoint], str | None]:
    """Return the checkpoints in order, with the marks newest, best and died; and the metric of the ranking."""
    everything = sorted(checkpoints, key=_order)
    complete = [one for one in everything if one.status == COMPLETE]
    newest = complete[-1].path if complete else None
    ranks, metric = _ranking(complete)
    deaths = _failures_by_checkpoint(complete, read_failures(output_dir))
    marked = [
        replace(
            one,
            is_newest=one.path == newest,
            best_rank=ranks.get(one.path),
            failures=tuple(deaths.get(one.path, ())),
        )
        for one in everything
    ]
    return marked, metric


def _order(one: ListedCheckpoint) -> tuple[bool, datetime, int, str]:
    time = datetime.fromisoformat(one.time) if one.time else datetime.max.replace(tzinfo=UTC)
    return one.status != COMPLETE, time, one.step or 0, one.path


def _ranking(complete: Sequence[ListedCheckpoint]) -> tuple[dict[str, int], str | None]:
    """Return the ranks by path: as the newest checkpoint records them, else by the evaluation loss."""
    if not complete:
        return {}, None
    try:
        metadata = CheckpointMetadata.read(complete[-1].path)
    except (CheckpointError, OSError):
        metadata = CheckpointMetadata()
    by_name = {one.name: one.path for one in complete}
    recorded = [by_name[name] for name, _ in metadata.best_checkpoints if name in by_name]
    if recorded:
        return {path: rank for rank, path in enumerate(recorded, start=1)}, metadata.best_metric_key
    evaluated = [one for one in complete if _LOSS in one.metrics and one.metrics[_LOSS] == one.metrics[_LOSS]]
    if not evaluated:
        return {}, None
    return {min(evaluated, key=lambda one: one.metrics[_LOSS]).path: 1}, _LOSS


def _failures_by_checkpoint(
    complete: Sequence[ListedCheckpoint], failures: Iterable[Failure]
) -> dict[str, list[Failure]]:
    """Return the failures by the path of the last checkpoint before each of them."""
    found: dict[str, list[Failure]] = {}
    for failure in failures:
        earlier = [one for one in complete if (one.step or 0) <= failure.step and _is_before(one, failure)]
        if earlier:
            last = max(earlier, key=lambda one: (one.step or 0, one.time or ""))
            found.setdefault(last.path, []).append(failure)
    return found


def _is_before(one: ListedCheckpoint, failure: Failure) -> bool:
    try:
        died_at = datetime.fromisoformat(failure.time)
    except ValueError:
        return True
    died_at = died_at if died_at.tzinfo is not None else died_at.replace(tzinfo=UTC)
    # Failures are noted in whole seconds.
    return one.time is None or datetime.fromisoformat(one.time).replace(microsecond=0) <= died_at


def own_checkpoints_of(path: str) -> list[str]:
    """Return Forgather's checkpoints of the run that a path belongs to, complete or not, oldest first."""
    run = output_dir_of(path) if os.path.isdir(path) and looks_like_checkpoint(path) else path
    listed = list_checkpoints(run).checkpoints
    return [one.path for one in listed if one.status in (COMPLETE, INCOMPLETE) and is_real_directory(one.path)]
