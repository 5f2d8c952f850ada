"""Background saves: staging memory, staged snapshots, deferred replica comparison, and the thread that writes them.

`background_saves` is the entry point. `CheckpointManager` owns a `BackgroundSaves` if `async_save=True`. Modules that
write files are imported when they are needed.
"""

from typing import TYPE_CHECKING

from forgather.ml.checkpoint.background.memory_plan import checked_async_save_memory
from forgather.ml.distributed import Peers

if TYPE_CHECKING:
    from forgather.ml.checkpoint.background.saves import BackgroundSaves


def background_saves(async_save: bool, memory: str | float | None, read_only: bool) -> "BackgroundSaves | None":
    """Return the background saves of a manager; None if `async_save` is off. Collective unless `read_only`."""
    memory = checked_async_save_memory(memory)
    if read_only:
        return None
    if len(set(Peers.world().gather(async_save, "comparing async_save"))) > 1:
        raise ValueError("async_save differs between ranks. Pass the same value on every rank.")
    if not async_save:
        return None
    from forgather.ml.checkpoint.background.saves import BackgroundSaves

    return BackgroundSaves(memory)
