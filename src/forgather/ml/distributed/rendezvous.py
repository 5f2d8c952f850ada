"""Rendezvous of restarted jobs: a key prefix in the torchrun store that no earlier attempt has used.

torchrun restarts the workers of a failed job and may pass them the same store. It still contains the addresses of the
dead workers, and new workers would try to connect to them. `DistributedEnvironment` calls `fresh_store` before
`init_process_group`.
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
    """Return whether the elastic launcher of torch (torchrun) started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def fresh_store(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return a `PrefixStore` that only the ranks of this attempt use; collective.

    Restart counters are not usable as a prefix, because the nodes of a job count restarts differently. Instead each
    rank writes a random mark. Rank 0 publishes a roster: a prefix, and the marks of all ranks. A rank accepts the
    prefix if the roster contains its mark, because only a live rank 0 can have read it.
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
            # A roster of an earlier attempt may be from a smaller job, so this index may not exist in it.
            if roster["marks"][rank : rank + 1] == [mark]:
                store.set(f"{roster['name']}/seen/{rank}", "")
                return PrefixStore(roster["name"], store)
        time.sleep(_POLL_SECONDS)


def _gather_marks(store: Store, world_size: int, deadline: float) -> str:
    """Publish the roster until every rank has seen it; return the prefix."""
    name = f"{_FOLDER}/{uuid.uuid4().hex}"
    keys = [f"{_FOLDER}/mark/{rank}" for rank in range(world_size)]
    seen = [f"{name}/seen/{rank}" for rank in range(1, world_size)]
    published: list[str] = []
    while True:
        _check(deadline, world_size)
        if store.check(keys):
            marks = [store.get(key).decode() for key in keys]
            # The first marks read may be from dead workers. Publish again whenever a new worker overwrites its mark.
            if marks != published:
                store.set(f"{_FOLDER}/roster", json.dumps({"name": name, "marks": marks}))
                published = marks
            if not seen or store.check(seen):
                return name
        time.sleep(_POLL_SECONDS)


def _check(deadline: float, world_size: int) -> None:
    if time.monotonic() > deadline:
        raise RuntimeError(
            f"Not all {world_size} ranks of this job started in time. See the output of the other ranks. With more than one "
            "node, check that all nodes were started with the same rendezvous endpoint."
        )
