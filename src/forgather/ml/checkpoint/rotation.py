"""Rotation of the checkpoints in one folder: ranking of the best, deletion by retention policy, moving of older runs.

Only the leader of a storage changes files. `CheckpointManager` calls it after each save and at a resume.
"""

import contextlib
import logging
import os
from collections.abc import Mapping
from typing import NamedTuple

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.all_ranks import on_every_rank
from forgather.ml.checkpoint.errors import CheckpointError, CheckpointLoadError, CheckpointSaveError
from forgather.ml.checkpoint.files.eval_metrics import load_checkpoint_metrics
from forgather.ml.checkpoint.foreign.ownership import recognise
from forgather.ml.checkpoint.manifest import CheckpointManifest, FileRecord
from forgather.ml.checkpoint.metadata import METADATA_COMPONENT, METADATA_NAME, CheckpointMetadata
from forgather.ml.checkpoint.retention import (
    BestCheckpoints,
    CheckpointInfo,
    LatestN,
    RetentionPolicy,
    checkpoints_to_delete,
)
from forgather.ml.checkpoint.storage import OutputDirectory
from forgather.ml.distributed import Peers

logger = logging.getLogger(__name__)

# Excludes NaN, infinity and integers beyond the float range, which could not be ranked as floats.
_LARGEST = 1e308
# Key in the manifest's metadata, present only if False.
_IS_FINITE = "weights_are_finite"


class Ranking(NamedTuple):
    """Metrics of a checkpoint, and how they rank it among the best; see `CheckpointManager.update_best_checkpoints`."""

    metrics: Mapping[str, float]
    metric_key: str
    greater_is_better: bool | None = None
    preserve_n_best: int | None = None


class CheckpointRotation:
    """Checkpoints of one folder. Only the rank that leads its storage changes them.

    `policy` selects the checkpoints to keep. The best ones, at most `preserve_n_best`, are always kept.
    """

    def __init__(self, directory: OutputDirectory, policy: RetentionPolicy, peers: Peers) -> None:
        self.best = BestCheckpoints()
        self._directory, self._folder = directory, directory.checkpoints
        self._policy = policy
        self._peers = peers
        self._leads_storage = directory.is_led_here
        self._is_shared = directory.is_shared
        self._preserve_n_best = 1
        self._is_fresh_run = False
        self._damaged: set[str] = set()

    def follow_limit(self, number: int | None) -> bool:
        """Keep this number of newest checkpoints from now on; False if another policy selects them."""
        if not isinstance(self._policy, LatestN):
            return False
        self._policy = LatestN(number)
        return True

    def contains(self, path: str) -> bool:
        """Return whether a checkpoint is in this folder."""
        # `realpath`, because users may pass the same folder through a symlink.
        return os.path.dirname(os.path.realpath(path)) == os.path.realpath(self._folder)

    def candidates(self) -> list[str]:
        """Return the complete checkpoints, oldest first, the same on every rank. Collective."""

        # Rank 0 lists a shared folder for all ranks, so that their lists cannot differ.
        def find() -> list[tuple[str, str]]:
            found = [] if self._is_shared and self._peers.rank != 0 else self._directory.find_checkpoints()
            return [(str(one.manifest.attempt), one.path) for one in found]

        told = on_every_rank(self._peers, find, "looking for checkpoints", CheckpointLoadError)
        if self._is_shared:
            return [path for _, path in told[0]]
        # With separate storages, every rank must have the same save (attempt). Its path may differ between nodes.
        own = dict(told[self._peers.rank])
        return [own[attempt] for attempt, _ in told[0] if all(attempt in dict(one) for one in told)]

    def begin_fresh_run(self) -> None:
        """Start a run without resume. Its first save moves the checkpoints of an older run to a separate folder.

        Otherwise retention would count them, and delete checkpoints of either run.
        """
        self._is_fresh_run = True

    def continue_run(self) -> None:
        """Record that a checkpoint was loaded or saved: all checkpoints in the folder now belong to this run."""
        self._is_fresh_run = False

    def note_damaged(self, path: str) -> None:
        """Record a checkpoint that could not be loaded. A save under its name sets it aside."""
        self._damaged.add(os.path.abspath(path))

    def clear_the_way(self, path: str) -> None:
        """Move an older run and a damaged checkpoint out of the way of a commit. Called on the committing rank.

        This happens just before the commit, so that a save that fails while writing moves nothing.
        """
        if self._is_fresh_run and self.contains(path):
            moved_to = store.move_older_run(self._folder, self._directory.any_name)
            if moved_to is not None:
                logger.warning(
                    "This run started afresh (resume_from_checkpoint=False). Checkpoints of the older run were moved to %s.",
                    moved_to,
                )
        # `commit` sets aside incomplete directories. A complete one may also be damaged, which only the load has shown.
        if os.path.abspath(path) in self._damaged:
            self._damaged.discard(os.path.abspath(path))
            store.set_aside(path, store.new_attempt())

    @property
    def preserve_n_best(self) -> int:
        """Number of best checkpoints to keep."""
        return self._preserve_n_best

    @preserve_n_best.setter
    def preserve_n_best(self, number: int) -> None:
        # `type(...) is int` excludes bool.
        if type(number) is not int or number < 0:
            raise ValueError(
                f"preserve_n_best={number!r} is not a number of checkpoints: it must be an integer, 0 or more."
            )
        self._preserve_n_best = number
        self.best.entries = self.best.entries[:number]

    def after_commit(self, path: str, ranking: Ranking | None, peers: Peers) -> None:
        """Delete the surplus checkpoints, only now that the new one is on disk, and rank it. Collective over `peers`."""
        self.continue_run()
        self.remove_surplus()
        if ranking is not None:
            self.rank_checkpoint(path, ranking, peers)

    def rank_checkpoint(self, path: str, ranking: Ranking, peers: Peers) -> bool:
        """Rank a checkpoint, record the ranking in it, and delete the surplus. Return whether it is one of the best.

        Collective over `peers`, since a background save has its own process group.
        """
        with contextlib.nullcontext() if peers.size == 1 else peers.agreement("ranking the checkpoints"):
            is_best = self._rank(path, ranking)
        # Written before the surplus is deleted: after a kill, a resume still finds the complete ranking.
        on_every_rank(peers, lambda: self.write_best(path), "recording the best checkpoints", CheckpointSaveError)
        self.remove_surplus()
        return is_best

    def _rank(self, path: str, ranking: Ranking) -> bool:
        if ranking.preserve_n_best is not None:
            self.preserve_n_best = ranking.preserve_n_best
        metrics, key, greater_is_better, _ = ranking
        return self.best.update(path, metrics, key, greater_is_better, self._preserve_n_best)

    def write_best(self, path: str) -> None:
        """Write the ranking into the checkpoint, so that a resume from it restores the ranking including itself."""
        if self._leads_storage and os.path.isdir(path):
            # `amend_file` fills in size and checksum.
            metadata = CheckpointMetadata.read(path).with_best(self.best)
            record = FileRecord(METADATA_NAME, 0, "", self._peers.rank, METADATA_COMPONENT)
            store.amend_file(path, record, metadata.to_bytes())

    def remove_surplus(self) -> None:
        """Delete the checkpoints that neither the policy nor the ranking of the best keeps."""
        if not self._leads_storage:
            return
        try:
            for surplus in checkpoints_to_delete(self._known(), self.best | self._policy):
                store.delete_checkpoint(surplus.path)
        except (OSError, ValueError, CheckpointError) as error:
            # The new checkpoint is saved, and no agreement follows: an error on this rank alone would hang the others.
            logger.warning("Old checkpoints could not be removed: %s", error)

    def newest_sound(self) -> str | None:
        """Return the newest checkpoint with finite weights. None on ranks that do not lead a storage."""
        if not self._leads_storage:
            return None
        found = store.find_checkpoints(self._folder, self._directory.any_name)
        return next((one.path for one in reversed(found) if _is_sound(one.manifest)), None)

    def _known(self) -> list[CheckpointInfo]:
        return [
            CheckpointInfo(
                one.path, one.manifest.step, one.manifest.written_at, _metrics_of(one.path), _is_sound(one.manifest)
            )
            for one in store.find_checkpoints(self._folder, self._directory.any_name)
        ]


def stored_weight_decay_groups(path: str) -> str | None:
    """Return the weight-decay grouping of a checkpoint's optimizer, "all" or "auto".

    None for a checkpoint of another program: the settings of this run apply. If the checkpoint is damaged, return the
    grouping of the newest readable checkpoint in its folder.
    """
    if recognise(path) is not None:
        return None
    try:
        return CheckpointMetadata.read(path).weight_decay_groups
    except (CheckpointError, OSError):
        # The load that follows reports the damage and falls back to an older checkpoint.
        pass
    for other in reversed(store.find_checkpoints(os.path.dirname(os.path.abspath(path)))):
        with contextlib.suppress(CheckpointError, OSError):
            return CheckpointMetadata.read(other.path).weight_decay_groups
    return "all"


def soundness_note(is_sound: bool) -> dict[str, object]:
    """Return the manifest metadata that marks a checkpoint with weights that are not finite; {} for a sound one."""
    return {} if is_sound else {_IS_FINITE: False}


def _is_sound(manifest: CheckpointManifest) -> bool:
    return manifest.metadata.get(_IS_FINITE) is not False


def _metrics_of(path: str) -> dict[str, float]:
    """Return the metrics for retention policies. A damaged metrics file only warns, because training must continue."""
    try:
        metrics = load_checkpoint_metrics(path) or {}
        return {name: value for name, value in metrics.items() if type(value) in (int, float) and abs(value) < _LARGEST}
    except (OSError, CheckpointError) as error:
        logger.warning("The metrics of %s cannot be read: %s", path, error)
        return {}
