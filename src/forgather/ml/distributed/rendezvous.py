"""Rendezvous of a job: its store, the ranks that are still missing, and a key prefix that no earlier attempt has used.

Without a launcher nobody notices a rank that ends before it joins, so the others say for which ranks they wait.

torchrun restarts the workers of a failed job and may pass them the same store. It still contains the addresses of the
dead workers, and new workers would try to connect to them. `DistributedEnvironment` calls these functions before
`init_process_group`.
"""

import json
import logging
import os
import socket
import time
import uuid
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import TCPStore

from forgather._watch.message import names

logger = logging.getLogger(__name__)

SETUP_LIMIT = timedelta(minutes=10)
"""Time for all ranks to join, if the user sets no timeout. Collectives wait longer: a rank may work for that long."""
_ARRIVED = "forgather/arrived"
_NUM_ARRIVED = "forgather/num_arrived"
_FIRST_REPORT = 10.0
_MOST_SECONDS_BETWEEN_REPORTS = 60.0
_CONNECT_SECONDS = 2.0
_CONNECT_POLL_SECONDS = 0.2
_MOST_POLLS_PER_SECOND = 5000
"""Questions of all ranks to the store."""
_LONGER = "If it needs more time, pass a longer timeout to DistributedEnvironment, on all ranks."
_FOLDER = "forgather/attempt"
_POLL_SECONDS = 0.02


class _Waiting:
    """Wait for other ranks, with a limit, and with reports that become rarer."""

    def __init__(self, limit: timedelta) -> None:
        self._began = time.monotonic()
        self._limit = limit.total_seconds()
        self._next_report = _FIRST_REPORT

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @property
    def is_over(self) -> bool:
        return self.seconds >= self._limit

    @property
    def is_due(self) -> bool:
        """Whether the time for a report, or the end, has come."""
        return self.seconds >= self._next_report or self.is_over

    def report(self, who: str, is_told: bool = True) -> None:
        """Log for whom this rank waits; `is_told` is False if another rank says it."""
        self._next_report = self.seconds + min(max(self.seconds, _FIRST_REPORT), _MOST_SECONDS_BETWEEN_REPORTS)
        if is_told:
            logger.warning("waiting for %s (%.0f s)", who, self.seconds)


def open_store(rank: int, world_size: int, address: str, port: int, limit: timedelta) -> Store:
    """Return the store of the job, which rank 0 hosts, or the agent of torchrun; raise RuntimeError if nobody does."""
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_host = rank == 0 and not by_agent
    if not is_host:
        _wait_for_host("the store of the launcher" if by_agent else "rank 0", address, port, limit)
    # Not `wait_for_workers`: it waits for the other ranks without a word.
    return TCPStore(
        address, port, world_size, is_host, timeout=limit, wait_for_workers=False, multi_tenant=not by_agent
    )


def _wait_for_host(who: str, address: str, port: int, limit: timedelta) -> None:
    waiting = _Waiting(limit)
    while True:
        try:
            return socket.create_connection((address, port), _CONNECT_SECONDS).close()
        except OSError as error:
            if waiting.is_over:
                raise RuntimeError(
                    f"{who} has not joined this job within {waiting.seconds:.0f} s: {address}:{port} cannot be reached "
                    f"({error}). See its output, and check MASTER_ADDR and MASTER_PORT. {_LONGER}"
                ) from error
        if waiting.is_due:
            waiting.report(f"{who} at {address}:{port}")
        time.sleep(_CONNECT_POLL_SECONDS)


def wait_for_ranks(store: Store, rank: int, world_size: int, limit: timedelta) -> None:
    """Wait until every rank has come to this store, and say which ranks are missing; raise RuntimeError at the limit."""
    keys = [f"{_ARRIVED}/{number}" for number in range(world_size)]
    store.set(keys[rank], "")
    store.add(_NUM_ARRIVED, 1)
    waiting, missing = _Waiting(limit), list[int]()
    try:
        # Each rank asks for the number only, until it is complete: many ranks would ask for many keys. `store.wait` prints
        # warnings of its own.
        while store.add(_NUM_ARRIVED, 0) < world_size or not store.check(keys):
            if waiting.is_due:
                missing = [number for number, key in enumerate(keys) if not store.check([key])]
            if missing and waiting.is_over:
                raise TimeoutError
            if missing and waiting.is_due:
                # One rank speaks for all.
                waiting.report(names(missing), is_told=rank == min(set(range(world_size)) - set(missing)))
            time.sleep(max(_POLL_SECONDS, world_size / _MOST_POLLS_PER_SECOND))
    except TimeoutError:
        raise RuntimeError(
            f"{names(missing)} of {world_size} {'has' if len(missing) == 1 else 'have'} not joined this job within "
            f"{waiting.seconds:.0f} s: not started, or ended before. See the output of the missing ranks. {_LONGER}"
        ) from None
    except RuntimeError as error:
        raise RuntimeError(
            f"the store of this job was lost after {waiting.seconds:.0f} s of waiting for "
            f"{names(missing) if missing else 'the other ranks'}: rank 0 or the launcher has ended. Its output shows the "
            f"cause. ({error})"
        ) from error


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
