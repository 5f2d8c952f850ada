"""Notes in the store of torch.distributed: slots of this node are published, slots of other nodes are copied to it.

Whichever rank of a node comes first publishes for all of them, so that a stuck rank silences no other. The store is
reached over a separate connection, because calls on one connection block each other.
"""

import json
import logging
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from forgather._watch.board import PUBLISHED, STACKS_DONE, Board, asked_stacks_path
from forgather._watch.judge import period

logger = logging.getLogger(__name__)

_PREFIX = "forgather/watch"
_VERDICT = "verdict"
_STACKS_ASKED = "stacks_asked"
_MOST_STACK_CHARACTERS = 200_000
_STORE_TIMEOUT = timedelta(seconds=10)


class StoreNotes:
    """Exchange of notes between the nodes of a job."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._known: set[int] = set()
        """Ranks on other nodes with a note in the store."""
        self._period = period(board.num_ranks)
        self._told: dict[int, int] = {}
        """The last request for stacks that was answered in the store, by rank."""
        self._report = board.failure
        """The last failure report that was shared; at first that of an earlier run, if any."""

    def run(self, stop: threading.Event) -> None:
        """Exchange notes until `stop`, or until the store is gone. Ranks on other nodes then count as unreachable."""
        try:
            store = own_connection()
            if store is None:
                logger.info("The watch sees the ranks of this node only: the job has no TCPStore.")
                return
            while not stop.wait(self._period / 2):
                self._exchange(store)
        except (RuntimeError, OSError) as error:
            if not stop.is_set():
                logger.info("The watch lost the store of the job, and no longer sees other nodes: %s", error)

    def _exchange(self, store: Any) -> None:
        # Imported here, because it imports the agreement of ranks, which imports the watch.
        from forgather.ml.distributed.failure_reports import share

        now = int(time.monotonic() * 1000)
        if now - self._board.published_at < self._period * 900:
            return
        self._board.published_at = now
        local = self._board.local_ranks
        for rank in local:
            self._board.cells[rank][PUBLISHED] += 1
        store.multi_set([str(rank) for rank in local], [self._board.slot(rank) for rank in local])
        self._copy(store, [rank for rank in range(self._board.num_ranks) if rank not in local])
        self._share_verdict(store)
        self._report = share(store, self._board, self._report)
        if store.check([_STACKS_ASKED]):
            self._share_stacks(store, local, int(store.get(_STACKS_ASKED)))

    def _share_stacks(self, store: Store, local: list[int], asked: int) -> None:
        """Pass a request for stacks on to the ranks of this node, and their answers to the store."""
        if asked > self._board.stacks_asked:
            self._board.stacks_asked = asked
        for rank in local:
            if self._told.get(rank) != asked and self._board.cells[rank][STACKS_DONE] == asked:
                self._told[rank] = asked
                store.set(stacks_key(asked, rank), read_stacks(asked_stacks_path(self._board, rank)))

    def _copy(self, store: Store, elsewhere: list[int]) -> None:
        # `multi_get` would wait for a rank that has not come yet.
        self._known |= {rank for rank in elsewhere if rank not in self._known and store.check([str(rank)])}
        ranks = [rank for rank in elsewhere if rank in self._known]
        slots = store.multi_get([str(rank) for rank in ranks]) if ranks else []
        for rank, slot in zip(ranks, slots, strict=True):
            self._board.mirror(rank, slot)

    def _share_verdict(self, store: Store) -> None:
        verdict = self._board.verdict
        if verdict is not None:
            store.set(_VERDICT, json.dumps(verdict))
        elif store.check([_VERDICT]):
            self._board.set_verdict(json.loads(store.get(_VERDICT)))


def ask_for_stacks(store: Store, number: int) -> None:
    """Ask the ranks of all nodes for their stacks."""
    store.set(_STACKS_ASKED, str(number))


def stacks_key(asked: int, rank: int) -> str:
    """Return the key with the stacks of a rank."""
    return f"stacks/{asked}/{rank}"


def read_stacks(path: str) -> str:
    """Return the stacks in a file, at most a part that the store can carry."""
    try:
        with open(path, errors="replace") as file:
            return file.read(_MOST_STACK_CHARACTERS)
    except OSError as error:
        return f"The stacks cannot be read: {error.strerror}."


def own_connection() -> Store | None:
    """Return a new connection to the default store; None if torch.distributed has no TCPStore."""
    if not address_of_store():
        return None
    default: Any = dist.distributed_c10d._get_default_store()
    own = default.clone()
    own.set_timeout(_STORE_TIMEOUT)
    return PrefixStore(_PREFIX, own)


def address_of_store() -> tuple[object, ...]:
    """Return host and port of the default store; nothing if torch.distributed has no TCPStore."""
    if not (dist.is_available() and dist.is_initialized()):
        return ()
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, TCPStore) else ()
