"""Output directory of checkpoints: configuration, lock, recovery at start, and the ranks that share it.

Only the leader of a directory (`is_led_here`) locks it, commits to it and deletes from it. `CheckpointManager`
constructs an `OutputDirectory` on all ranks together.
"""

import contextlib
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.all_ranks import on_every_rank
from forgather.ml.checkpoint.errors import CheckpointError, CheckpointLoadError
from forgather.ml.checkpoint.files.durable import make_directories
from forgather.ml.checkpoint.files.layout import IN_FOLDER, checkpoints_root, counts_any_name, refuse_other_place
from forgather.ml.checkpoint.output_lock import OutputDirLock
from forgather.ml.checkpoint.rank_layout import StorageScope, ranks_text
from forgather.ml.distributed import DistributedEnvInterface, Peers

logger = logging.getLogger(__name__)

_PROBE = ".storage-probe-"
_PROBE_FILE = re.compile(re.escape(_PROBE) + "[0-9a-f]{12}")


@dataclass(kw_only=True)
class CheckpointConfig:
    """Output directory, number of checkpoints to keep, and storage layout."""

    output_dir: str
    save_total_limit: int | None
    """Number of newest checkpoints to keep, besides the best ones. None or 0 keeps all."""
    save_on_each_node: bool = False
    """Each node has separate storage and saves there the state that its ranks need."""
    save_safetensors: bool = True
    save_on_local_rank: int = 0
    """With save_on_each_node: local rank that commits a node's checkpoints."""
    save_on_all_ranks: bool = False
    """Each rank may have separate storage and saves there the state that it needs.

    A probe file shows whether all ranks share output_dir. If so, they write one checkpoint together.
    """
    checkpoint_layout: str = IN_FOLDER
    """"checkpoints": `<output_dir>/checkpoints/checkpoint-N`. "output_dir": `<output_dir>/checkpoint-N`."""


class OutputDirectory:
    """Output directory as this rank sees it. Construction is collective.

    `scope` ("job", "node" or "rank") describes the ranks that share it. `is_led_here` is True on the leader, the rank
    that locks, commits and deletes.
    """

    def __init__(self, config: CheckpointConfig, env: DistributedEnvInterface, peers: Peers, read_only: bool) -> None:
        self.path = config.output_dir
        self.layout = config.checkpoint_layout
        self.checkpoints = checkpoints_root(config.output_dir, config.checkpoint_layout)
        self.any_name = counts_any_name(config.checkpoint_layout)
        self.scope = _find_scope(config, peers, read_only)
        # Must agree with the leaders that `RankLayout` chooses for the same scope.
        self.is_led_here = {
            "job": peers.rank == 0,
            "node": env.local_rank == config.save_on_local_rank,
            "rank": True,
        }[self.scope]
        self.names_of_others: frozenset[str] = frozenset()
        """Checkpoint names of other programs in any storage of the job, set after `take`."""
        self._lock = OutputDirLock(config.output_dir)

    @property
    def is_shared(self) -> bool:
        """Whether all ranks of the job see this directory."""
        return self.scope == "job"

    def take(self) -> frozenset[str]:
        """Lock the directory and recover from a killed job, on the leader. Other ranks do nothing.

        Return the checkpoint names that other programs use there.
        """
        from forgather.ml.checkpoint.weights.export import remove_unfinished_exports

        if not self.is_led_here:
            return frozenset()
        # The lock comes first: recovery deletes the temporary files of every save, also of a running job.
        self._lock.acquire()
        # This raises for symlinks under checkpoint names, so it comes before recovery deletes anything.
        taken = store.names_taken_by_others(self.checkpoints)
        remove_unfinished_exports(self.path)
        _remove_probes(self.path)
        for line in store.recover(self.checkpoints, self.any_name):
            logger.info("Recovery: %s", line)
        # After recovery, which may complete a checkpoint.
        refuse_other_place(self.path, self.layout)
        return taken

    def path_of(self, checkpoint_id: str | int) -> str:
        """Return the path of the checkpoint for a step, beside a checkpoint of another program with this name."""
        name = store.name_beside_others(checkpoint_id, self.names_of_others)
        return store.checkpoint_path(self.path, name, self.layout)

    def warn_of_taken_name(self, checkpoint_id: str | int) -> None:
        """Log a warning if the checkpoint gets another name, because tools that look for the usual name miss it."""
        path, usual = self.path_of(checkpoint_id), store.checkpoint_path(self.path, checkpoint_id, self.layout)
        if path != usual and self.is_led_here:
            logger.warning(
                "%s belongs to another program and stays as it is, so this checkpoint is saved as %s. Tools that look for "
                "the name checkpoint-<step>, such as get_last_checkpoint of transformers, do not find it. "
                "resume_from_checkpoint=True does; or pass its path.",
                *(usual, path),
            )

    def find_checkpoints(self) -> list[store.FoundCheckpoint]:
        """Return the complete checkpoints, oldest first. Raise if the other layout has checkpoints too."""
        refuse_other_place(self.path, self.layout)
        return store.find_checkpoints(self.checkpoints, self.any_name)

    def require_held(self) -> None:
        """Raise `OSError` if this job locked the directory and has lost the lock."""
        self._lock.require_held()

    def give_back(self) -> None:
        """Release the lock."""
        self._lock.release()


def _remove_probes(output_dir: str) -> None:
    """Delete probe files of killed jobs."""
    for name in sorted(os.listdir(output_dir)):
        if _PROBE_FILE.fullmatch(name):
            os.remove(os.path.join(output_dir, name))


def _find_scope(config: CheckpointConfig, peers: Peers, read_only: bool) -> StorageScope:
    """Return the storage scope. Collective if `save_on_all_ranks` is set and the manager is not read-only."""
    if not config.save_on_all_ranks:
        return "node" if config.save_on_each_node else "job"
    if read_only:
        # A reader must not write a probe. Scope "rank" also finds the checkpoints of shared storage.
        return "rank"
    return probe_storage(peers, config.output_dir, peers.broadcast(store.new_attempt()))


def newest_checkpoint(output_dir: str, layout: str) -> str:
    """Return the newest complete checkpoint. Raise `CheckpointLoadError` without one."""
    root = checkpoints_root(output_dir, layout)
    refuse_other_place(output_dir, layout)
    found = store.find_checkpoints(root, counts_any_name(layout))
    if not found:
        raise CheckpointLoadError(f"There is no complete checkpoint in {root}.")
    return found[-1].path


def probe_storage(peers: Peers, output_dir: str, attempt: str) -> StorageScope:
    """Return "job" if all ranks share `output_dir`, "rank" if each rank has its own. Collective.

    Rank 0 writes a probe file and every rank looks for it. Raise `CheckpointError` if only some ranks see it.
    """
    if peers.size == 1:
        return "job"
    # A new name for each attempt, because network file systems cache the absence of a name.
    path = os.path.join(output_dir, f"{_PROBE}{attempt}")

    def write() -> None:
        make_directories(os.path.abspath(output_dir))
        if peers.rank == 0:
            with open(path, "x"):
                pass

    try:
        on_every_rank(peers, write, "writing the storage probe", CheckpointError)
        # The agreement above is the barrier: no rank looks before rank 0 has written.
        seen = on_every_rank(peers, lambda: os.path.exists(path), "looking for the storage probe", CheckpointError)
    finally:
        # The file may not exist, because writing it can fail.
        if peers.rank == 0:
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)
    # Some ranks share the directory of rank 0 and some do not. Neither scope would be right for all of them.
    if not all(seen) and any(seen[1:]):
        raise CheckpointError(_describe_mixed_storage(seen))
    return "job" if all(seen) else "rank"


def _describe_mixed_storage(seen: Sequence[bool]) -> str:
    sharing = ranks_text([rank for rank, sees in enumerate(seen) if sees])
    return (
        "save_on_all_ranks=True needs an output_dir that all ranks share, or a separate one for each rank. But only "
        f"{sharing} share the output_dir of rank 0. If the ranks of a node share storage, set save_on_each_node=True and "
        "save_on_all_ranks=False."
    )
