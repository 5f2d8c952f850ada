"""Rotation of the checkpoints in one folder: ranks the best, deletes what retention does not keep, moves older runs."""

import contextlib
import logging
import os
from collections.abc import Mapping

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.all_ranks import on_every_rank
from forgather.ml.checkpoint.errors import CheckpointError, CheckpointLoadError
from forgather.ml.checkpoint.files.eval_metrics import load_checkpoint_metrics
from forgather.ml.checkpoint.foreign.ownership import recognise
from forgather.ml.checkpoint.manifest import CheckpointManifest, FileRecord
from forgather.ml.checkpoint.metadata import METADATA_NAME, CheckpointMetadata
from forgather.ml.checkpoint.retention import (
    BestCheckpoints,
    CheckpointInfo,
    RetentionPolicy,
    checkpoints_to_delete,
)
from forgather.ml.checkpoint.snapshot import METADATA_COMPONENT
from forgather.ml.checkpoint.storage import OutputDirectory
from forgather.ml.distributed import Peers

logger = logging.getLogger(__name__)

# A metric beyond what a float holds is no metric.
_LARGEST = 1e308
_IS_FINITE = "weights_are_finite"


class CheckpointRotation:
    """The checkpoints of one folder; only the rank that leads its storage changes anything there.

    `policy` decides what is kept. The best checkpoints, at most `preserve_n_best`, are kept in any case.
    """

    def __init__(self, directory: OutputDirectory, policy: RetentionPolicy, peers: Peers) -> None:
        self.best = BestCheckpoints()
        self._folder = directory.checkpoints
        self._policy = policy
        self._peers = peers
        self._leads_storage = directory.is_led_here
        self._is_shared = directory.is_shared
        self._preserve_n_best = 1
        self._is_fresh_run = False
        self._damaged: set[str] = set()

    def contains(self, path: str) -> bool:
        """Whether a checkpoint is one of this folder."""
        return os.path.dirname(os.path.realpath(path)) == os.path.realpath(self._folder)

    def candidates(self) -> list[str]:
        """Complete checkpoints, oldest first, the same ones on every rank: rank 0 decides. Collective."""

        def find() -> list[tuple[str, str]]:
            found = [] if self._is_shared and self._peers.rank != 0 else store.find_checkpoints(self._folder)
            return [(str(one.manifest.attempt), one.path) for one in found]

        told = on_every_rank(self._peers, find, "looking for checkpoints", CheckpointLoadError)
        if self._is_shared:
            return [path for _, path in told[0]]
        # With storage of its own, each node must have the checkpoint; it may lie under another path there.
        own = dict(told[self._peers.rank])
        return [own[attempt] for attempt, _ in told[0] if all(attempt in dict(one) for one in told)]

    def begin_fresh_run(self) -> None:
        """Note that nothing is resumed: the first save moves the checkpoints of an older run out of retention's way."""
        self._is_fresh_run = True

    def continue_run(self) -> None:
        """Note that a checkpoint was loaded or saved: the ones that are there belong to this run."""
        self._is_fresh_run = False

    def note_damaged(self, path: str) -> None:
        """Remember a checkpoint that could not be loaded; a save under its name sets it aside."""
        self._damaged.add(os.path.abspath(path))

    def clear_the_way(self, path: str) -> None:
        """Just before a commit, on the rank that commits: older runs and damaged checkpoints are kept, but elsewhere."""
        if self._is_fresh_run and self.contains(path):
            moved_to = store.move_older_run(self._folder)
            if moved_to is not None:
                logger.warning(
                    "This run started afresh (resume_from_checkpoint=False): the checkpoints of an older run are now in %s.",
                    moved_to,
                )
        if os.path.abspath(path) in self._damaged:
            self._damaged.discard(os.path.abspath(path))
            store.set_aside(path, store.new_attempt())

    @property
    def preserve_n_best(self) -> int:
        """How many of the best checkpoints are kept."""
        return self._preserve_n_best

    @preserve_n_best.setter
    def preserve_n_best(self, number: int) -> None:
        if type(number) is not int or number < 0:
            raise ValueError(
                f"preserve_n_best={number!r} is not a number of checkpoints: it must be an integer, 0 or more."
            )
        self._preserve_n_best = number
        self.best.entries = self.best.entries[:number]

    def rank_checkpoint(
        self, path: str, metrics: Mapping[str, float], metric_key: str, greater_is_better: bool | None
    ) -> bool:
        """Enter a checkpoint into the list of the best; True when it is one of them."""
        return self.best.update(path, metrics, metric_key, greater_is_better, self._preserve_n_best)

    def write_best(self, path: str) -> None:
        """Put the list into the checkpoint itself, so that a resume from it knows of this checkpoint."""
        if self._leads_storage and os.path.isdir(path):
            metadata = CheckpointMetadata.read(path).with_best(self.best)
            record = FileRecord(METADATA_NAME, 0, "", self._peers.rank, METADATA_COMPONENT)
            store.amend_file(path, record, metadata.to_bytes())

    def remove_surplus(self) -> None:
        """Delete the checkpoints that neither the policy nor the list of the best keeps."""
        if not self._leads_storage:
            return
        try:
            for surplus in checkpoints_to_delete(self._known(), self.best | self._policy):
                store.delete_checkpoint(surplus.path)
        except (OSError, ValueError, CheckpointError) as error:
            # The checkpoint of this save is there, and the other ranks have gone on: one rank must not fail now.
            logger.warning("Old checkpoints could not be removed: %s", error)

    def newest_sound(self) -> str | None:
        """The newest checkpoint with finite weights; None on ranks that do not lead a storage."""
        if not self._leads_storage:
            return None
        found = store.find_checkpoints(self._folder)
        return next((one.path for one in reversed(found) if _is_sound(one.manifest)), None)

    def _known(self) -> list[CheckpointInfo]:
        return [
            CheckpointInfo(
                one.path, one.manifest.step, one.manifest.written_at, _metrics_of(one.path), _is_sound(one.manifest)
            )
            for one in store.find_checkpoints(self._folder)
        ]


def stored_weight_decay_groups(path: str) -> str | None:
    """How the optimizer of a checkpoint groups its parameters; of a damaged one, the nearest older one tells.

    None for a checkpoint of another program: the settings of this run decide.
    """
    if recognise(path) is not None:
        return None
    try:
        return CheckpointMetadata.read(path).weight_decay_groups
    except (CheckpointError, OSError):
        # Loading it will say what is wrong; the run goes on from an older one then.
        pass
    for other in reversed(store.find_checkpoints(os.path.dirname(os.path.abspath(path)))):
        with contextlib.suppress(CheckpointError, OSError):
            return CheckpointMetadata.read(other.path).weight_decay_groups
    return "all"


def soundness_note(is_sound: bool) -> dict[str, object]:
    """What the manifest of a checkpoint says when its weights are not finite."""
    return {} if is_sound else {_IS_FINITE: False}


def _is_sound(manifest: CheckpointManifest) -> bool:
    return manifest.metadata.get(_IS_FINITE) is not False


def _metrics_of(path: str) -> dict[str, float]:
    """What retention policies see; a damaged file of metrics must not stop training."""
    try:
        metrics = load_checkpoint_metrics(path) or {}
        return {name: value for name, value in metrics.items() if type(value) in (int, float) and abs(value) < _LARGEST}
    except (OSError, CheckpointError) as error:
        logger.warning("The metrics of %s cannot be read: %s", path, error)
        return {}
