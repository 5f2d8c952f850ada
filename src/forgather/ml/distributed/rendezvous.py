"""A store that no earlier attempt of the job has written to.

torchrun restarts the workers of a failed job, but may give them the same store: the addresses that the dead have left
there would be taken for those of the living.
"""

import json
import os
import time
import uuid
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store

_FOLDER = "forgather/attempt"
_POLL_SECONDS = 0.02


def restarts_share_a_store() -> bool:
    """Whether this process was started by torch's elastic launcher."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def fresh_store(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """A part of the store that the ranks of this attempt alone use; collective.

    Numbers of restarts would not do, since the nodes of a job count them differently. Instead each rank leaves a mark
    of its own, and rank 0 names a part of the store together with the marks it has seen. A rank takes that name if its
    own mark is among them, because only a rank 0 that is alive can know it.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    mark = uuid.uuid4().hex
    store.set(f"{_FOLDER}/mark/{rank}", mark)
    if rank == 0:
        return PrefixStore(_gather_marks(store, world_size, deadline), store)
    while True:
        _check(deadline, world_size)
        if store.check([f"{_FOLDER}/roster"]):
            roster = json.loads(store.get(f"{_FOLDER}/roster"))
            if roster["marks"][rank : rank + 1] == [mark]:
                store.set(f"{roster['name']}/seen/{rank}", "")
                return PrefixStore(roster["name"], store)
        time.sleep(_POLL_SECONDS)


def _gather_marks(store: Store, world_size: int, deadline: float) -> str:
    """Name a part of the store, until every rank has seen it."""
    name = f"{_FOLDER}/{uuid.uuid4().hex}"
    keys = [f"{_FOLDER}/mark/{rank}" for rank in range(world_size)]
    seen = [f"{name}/seen/{rank}" for rank in range(1, world_size)]
    published: list[str] = []
    while True:
        _check(deadline, world_size)
        if store.check(keys):
            marks = [store.get(key).decode() for key in keys]
            if marks != published:
                store.set(f"{_FOLDER}/roster", json.dumps({"name": name, "marks": marks}))
                published = marks
            if not seen or store.check(seen):
                return name
        time.sleep(_POLL_SECONDS)


def _check(deadline: float, world_size: int) -> None:
    if time.monotonic() > deadline:
        raise RuntimeError(
            f"The {world_size} ranks of this job did not all start in time. Look at the output of the others; on several nodes "
            "check that all were started, with the same rendezvous endpoint."
        )
