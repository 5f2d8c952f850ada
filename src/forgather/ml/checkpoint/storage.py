"""Storage of checkpoints: where they go, which ranks see one output directory, and who owns it while the job runs."""

import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.all_ranks import on_every_rank
from forgather.ml.checkpoint.errors import CheckpointError
from forgather.ml.checkpoint.files.durable import make_directories
from forgather.ml.checkpoint.output_lock import OutputDirLock
from forgather.ml.checkpoint.rank_layout import StorageScope, ranks_text
from forgather.ml.checkpoint.weights.export import remove_unfinished_exports
from forgather.ml.distributed import DistributedEnvInterface, Peers

logger = logging.getLogger(__name__)

_PROBE = ".storage-probe-"


@dataclass(kw_only=True)
class CheckpointConfig:
    """Where checkpoints go and how many are kept."""

    output_dir: str
    save_total_limit: int | None
    """The newest so many are kept, beside the best; None or 0 keeps all."""
    save_on_each_node: bool = False
    """Each node has storage of its own, and keeps there what its ranks need."""
    save_safetensors: bool = True
    save_on_local_rank: int = 0
    """With save_on_each_node: the local rank that commits a node's checkpoints."""
    save_on_all_ranks: bool = False
    """Every rank writes its own part: into one directory where ranks share storage, else each rank into its own.

    A probe file that rank 0 writes and all ranks look for tells which.
    """


class OutputDirectory:
    """The output directory as this rank sees it; constructed by all ranks together.

    `scope` tells which ranks share it, and `is_led_here` whether this rank is the one that commits, deletes and locks.
    """

    def __init__(self, config: CheckpointConfig, env: DistributedEnvInterface, peers: Peers, read_only: bool) -> None:
        self.path = config.output_dir
        self.checkpoints = os.path.join(config.output_dir, store.CHECKPOINTS_FOLDER)
        self.scope = _find_scope(config, peers, read_only)
        self.is_led_here = {
            "job": peers.rank == 0,
            "node": env.local_rank == config.save_on_local_rank,
            "rank": True,
        }[self.scope]
        self._lock = OutputDirLock(config.output_dir)

    @property
    def is_shared(self) -> bool:
        """Whether all ranks of the job see this directory."""
        return self.scope == "job"

    def take(self) -> frozenset[str]:
        """Lock the directory for this job and finish what a killed job left, on the rank that leads it.

        Returns the names that checkpoints of other programs have there.
        """
        if not self.is_led_here:
            return frozenset()
        self._lock.acquire()
        taken = store.names_taken_by_others(self.checkpoints)
        remove_unfinished_exports(self.path)
        for line in store.recover(self.checkpoints):
            logger.info("Recovery: %s", line)
        return taken

    def require_held(self) -> None:
        """Raise `OSError` when the directory was taken and is lost."""
        self._lock.require_held()

    def give_back(self) -> None:
        """Let other jobs have the directory."""
        self._lock.release()


def _find_scope(config: CheckpointConfig, peers: Peers, read_only: bool) -> StorageScope:
    """Collective, when every rank is to write."""
    if not config.save_on_all_ranks:
        return "node" if config.save_on_each_node else "job"
    if read_only:
        # A reader writes no probe; it finds the checkpoints of shared storage by its own path just as well.
        return "rank"
    return probe_storage(peers, config.output_dir, peers.broadcast(store.new_attempt()))


def probe_storage(peers: Peers, output_dir: str, attempt: str) -> StorageScope:
    """Find out whether ranks share a directory, by a file that rank 0 writes and all look for; collective.

    "job" when all ranks see the file, "rank" when only rank 0 does.
    """
    if peers.size == 1:
        return "job"
    # A name of its own for each attempt: no cache of a network file system can know that it does not exist.
    path = os.path.join(output_dir, f"{_PROBE}{attempt}")

    def write() -> None:
        make_directories(os.path.abspath(output_dir))
        if peers.rank == 0:
            with open(path, "x"):
                pass

    try:
        on_every_rank(peers, write, "writing the storage probe", CheckpointError)
        seen = on_every_rank(peers, lambda: os.path.exists(path), "looking for the storage probe", CheckpointError)
    finally:
        if peers.rank == 0:
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)
    if not all(seen) and any(seen[1:]):
        raise CheckpointError(_describe_mixed_storage(seen))
    return "job" if all(seen) else "rank"


def _describe_mixed_storage(seen: Sequence[bool]) -> str:
    sharing = ranks_text([rank for rank, sees in enumerate(seen) if sees])
    return (
        "save_on_all_ranks=True needs an output_dir that all ranks share, or one of its own for each rank. But "
        f"{sharing} share the one of rank 0, and the others do not see it. Where the ranks of a node "
        "share storage, set save_on_each_node=True and save_on_all_ranks=False."
    )
