"""Prefetch of a dispatcher: readers that read and send rounds ahead, in the main thread or in a background thread.

A round holds one batch for each data-parallel rank. `DataloaderDispatcher` uses a reader only if reading draws no random
numbers in this process: draws in another thread or ahead of time would mix with the draws of training.
"""

import queue
import threading
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

from forgather.ml.distributed.rank_messages import Pieces
from forgather.ml.trainer.loading.batch_transport import Sender

_SHORT_BYTES = 2**16


class Kind(Enum):
    """Kind of a message."""

    BATCH = "batch"
    END = "end"
    """End of the pass: no more data."""
    LEFT = "left"
    """End of the pass: the training loop left it early."""
    ERROR = "error"


class Message(NamedTuple):
    kind: Kind
    content: object
    """Batch, or the fields of an error."""
    position: Mapping[str, Any] | None
    """State of the loader after this batch."""


class Round(NamedTuple):
    """Messages to all data-parallel ranks for one step."""

    own: Message
    """Message for the reading rank."""
    packed: list[Pieces | None]
    """Serialised message for each shard; None for a shard of the reading rank only."""

    @property
    def is_last(self) -> bool:
        return self.own.kind is not Kind.BATCH


class QuickReader(Iterator[Round]):
    """Reader without a thread: reads and sends one round ahead of the training loop."""

    def __init__(self, rounds: Iterator[Round], sender: Sender) -> None:
        self._rounds = rounds
        self._sender = sender
        self._has_sent_last = False
        self._next, self._is_sent = self._read()

    def __next__(self) -> Round:
        one = self._next
        if not self._is_sent:
            self._send(one)
        if not one.is_last:
            self._next, self._is_sent = self._read()
        return one

    def request_end(self) -> None:
        """Do nothing: there is no thread to stop."""

    def end(self) -> bool:
        """Return whether the last message of the pass was sent."""
        return self._has_sent_last

    def _read(self) -> tuple[Round, bool]:
        one = next(self._rounds)
        # Send a long round only when the loop takes it. It does not fit into the socket buffers, so sending would block
        # until the other ranks receive.
        is_short = all(sum(map(len, pieces)) <= _SHORT_BYTES for pieces in one.packed if pieces is not None)
        if is_short:
            self._send(one)
        return one, is_short

    def _send(self, one: Round) -> None:
        self._sender.send(one.packed)
        self._has_sent_last = one.is_last


class ThreadedReader(Iterator[Round]):
    """Reader with a background thread: reads and sends at most `depth` rounds ahead of the training loop."""

    def __init__(self, rounds: Iterator[Round], sender: Sender, depth: int) -> None:
        self._rounds = rounds
        self._sender = sender
        self._ready: queue.SimpleQueue[Round | BaseException] = queue.SimpleQueue()
        self._free_places = threading.Semaphore(depth)
        self._is_to_end = False
        self._has_sent_last = False
        self._thread = threading.Thread(target=self._work, name="batch-reader", daemon=True)
        self._thread.start()

    def __next__(self) -> Round:
        one = self._ready.get()
        if isinstance(one, BaseException):
            raise one
        self._free_places.release()
        return one

    def request_end(self) -> None:
        self._is_to_end = True
        # Wake the thread if it waits for a free slot.
        self._free_places.release()

    def end(self) -> bool:
        """Stop the thread; return whether the last message of the pass was sent."""
        self.request_end()
        self._thread.join()
        return self._has_sent_last

    def _work(self) -> None:
        try:
            while not self._has_sent_last and self._waits_for_place():
                one = next(self._rounds)
                # The end may have been requested while this round was read. A last round is still sent: the other
                # ranks wait for it.
                if self._is_to_end and not one.is_last:
                    return
                self._sender.send(one.packed)
                self._has_sent_last = one.is_last
                self._ready.put(one)
        except BaseException as error:  # noqa: BLE001 - `__next__` raises it in the training loop
            self._ready.put(error)

    def _waits_for_place(self) -> bool:
        """Wait for a free slot; return False if the end was requested."""
        self._free_places.acquire()
        return not self._is_to_end
