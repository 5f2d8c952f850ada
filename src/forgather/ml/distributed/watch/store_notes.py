"""Notes in the store of torch.distributed: slots of this node are published, slots of other nodes are copied to it.

Whichever rank of a node comes first publishes for all of them, so that a stuck rank silences no other. The store is
reached over a separate connection, because calls on one connection block each other. Any process that reaches the store can
write to it, so notes are signed with a key that the ranks share by a collective, and others are ignored.
"""

import contextlib
import json
import logging
import secrets
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import DistStoreError, FileStore, PrefixStore, ProcessGroup, TCPStore

from forgather._job_secret import SealedStore, seal, unseal
from forgather._terminal_text import printable
from forgather._watch.board import PUBLISHED, STACKS_DONE, Board, asked_stacks_path
from forgather._watch.judge import period

logger = logging.getLogger(__name__)

_PREFIX = "forgather/watch"
_VERDICT = "verdict"
_STACKS_ASKED = "stacks_asked"
_MOST_STACK_CHARACTERS = 200_000
_STORE_TIMEOUT = timedelta(seconds=10)
_CLOCK_BYTES = 8

_shared_key: "tuple[ProcessGroup, bytes] | None" = None
"""Key of the ranks of the current WORLD."""


def share_key() -> None:
    """Give all ranks of the job a common key; collective on the first call for a process group."""
    # Imported here, because `agreement` imports this package.
    from forgather.ml.distributed.agreement import Peers

    global _shared_key
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if world is not None and (_shared_key is None or _shared_key[0] is not world):
        _shared_key = world, Peers().broadcast(secrets.token_bytes(32))


class StoreNotes:
    """Exchange of notes between the nodes of a job."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._known: set[int] = set()
        """Ranks on other nodes with a note in the store."""
        self._seen_at: dict[int, int] = {}
        """Time of the last note of a rank, by the clock of its node. An older note was played back."""
        self._period = period(board.num_ranks)
        self._told: dict[int, int] = {}
        """The last request for stacks that was answered in the store, by rank."""
        self._report = board.failure
        """The last failure report that was shared; at first that of an earlier run, if any."""

    def run(self, stop: threading.Event) -> None:
        """Exchange notes until `stop`, or until the store is gone. Ranks on other nodes then count as unreachable."""
        try:
            # The ranks share their key when all have come.
            while not _has_key():
                if stop.wait(self._period / 2):
                    return
            store = own_connection()
            while store is not None and not stop.wait(self._period / 2):
                # Somebody may have deleted a key; its owner writes it again.
                with contextlib.suppress(DistStoreError):
                    self._exchange(store)
        except (RuntimeError, OSError) as error:
            if not stop.is_set():
                logger.info("The watch lost the store of the job, and no longer sees other nodes: %s", error)

    def _exchange(self, store: "NoteStore") -> None:
        # Imported here, because it imports the agreement of ranks, which imports the watch.
        from forgather.ml.distributed.failure_reports import share

        now = int(time.monotonic() * 1000)
        if now - self._board.published_at < self._period * 900:
            return
        local = self._board.local_ranks
        if len(local) == self._board.num_ranks:
            return
        self._board.published_at = now
        for rank in local:
            self._board.cells[rank][PUBLISHED] += 1
        store.publish({rank: self._board.slot(rank) for rank in local})
        self._copy(store, [rank for rank in range(self._board.num_ranks) if rank not in local])
        self._share_verdict(store.sealed)
        self._report = share(store.sealed, self._board, self._report)
        if (asked := store.sealed.find(_STACKS_ASKED)) is not None:
            self._share_stacks(store.sealed, local, int(asked))

    def _share_stacks(self, store: SealedStore, local: list[int], asked: int) -> None:
        """Pass a request for stacks on to the ranks of this node, and their answers to the store."""
        if asked > self._board.stacks_asked:
            self._board.stacks_asked = asked
        for rank in local:
            if self._told.get(rank) != asked and self._board.cells[rank][STACKS_DONE] == asked:
                self._told[rank] = asked
                store.set(stacks_key(asked, rank), read_stacks(asked_stacks_path(self._board, rank)))

    def _copy(self, store: "NoteStore", elsewhere: list[int]) -> None:
        # Reading several keys at once would wait for a rank that has not come yet.
        self._known |= {rank for rank in elsewhere if rank not in self._known and store.has_note(rank)}
        try:
            found = store.read([rank for rank in elsewhere if rank in self._known])
        except DistStoreError:
            self._known.clear()
            raise
        for rank, (noted_at, slot) in found.items():
            if noted_at > self._seen_at.get(rank, -1):
                self._seen_at[rank] = noted_at
                self._board.mirror(rank, slot)

    def _share_verdict(self, store: SealedStore) -> None:
        verdict = self._board.verdict
        if verdict is not None:
            store.set(_VERDICT, json.dumps(verdict))
        elif (found := store.find(_VERDICT)) is not None:
            told = json.loads(found)
            self._board.set_verdict({**told, "text": printable(told["text"])})


class NoteStore:
    """The store of a job, as the watch uses it."""

    def __init__(self, store: Any, key: bytes) -> None:
        self._store = store
        self._key = key
        self.sealed = SealedStore(store, key)

    def publish(self, slots: dict[int, bytes]) -> None:
        clock = time.monotonic_ns().to_bytes(_CLOCK_BYTES, "big")
        notes = [seal(self._key, str(rank), clock + slot) for rank, slot in slots.items()]
        self._store.multi_set([str(rank) for rank in slots], notes)

    def has_note(self, rank: int) -> bool:
        return bool(self._store.check([str(rank)]))

    def read(self, ranks: list[int]) -> dict[int, tuple[int, bytes]]:
        """Return the time and the slot of the ranks whose notes are signed."""
        notes = self._store.multi_get([str(rank) for rank in ranks]) if ranks else []
        opened = {rank: unseal(self._key, str(rank), note) for rank, note in zip(ranks, notes, strict=True)}
        return {
            rank: (int.from_bytes(note[:_CLOCK_BYTES], "big"), note[_CLOCK_BYTES:])
            for rank, note in opened.items()
            if note is not None
        }


def ask_for_stacks(store: SealedStore, number: int) -> None:
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


def own_connection() -> NoteStore | None:
    """Return a new connection to the default store; None without a TCPStore, or before the ranks share a key."""
    if _shared_key is None or not _has_key() or not isinstance(_innermost(_default_store()), TCPStore):
        return None
    own = _default_store().clone()
    own.set_timeout(_STORE_TIMEOUT)
    return NoteStore(PrefixStore(_PREFIX, own), _shared_key[1])


def identity_of_store() -> tuple[object, ...]:
    """Return what two jobs on a machine never share: address or file of the default store; nothing for other stores."""
    if not (dist.is_available() and dist.is_initialized()):
        return ()
    store = _innermost(_default_store())
    if isinstance(store, FileStore):
        path: str = getattr(store, "path")  # noqa: B009 - missing in the stubs of torch
        return (path,)
    return (store.host, store.port) if isinstance(store, TCPStore) else ()


def _has_key() -> bool:
    is_initialized = dist.is_available() and dist.is_initialized()
    return is_initialized and _shared_key is not None and _shared_key[0] is dist.group.WORLD


def _default_store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _innermost(store: Any) -> Any:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
