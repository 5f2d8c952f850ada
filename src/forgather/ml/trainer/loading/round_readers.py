"""Readers of a dispatcher's rounds: read ahead and send, in the loop's thread or in a background thread."""

import queue
import threading
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

from forgather.ml.trainer.loading.batch_messages import Pieces
from forgather.ml.trainer.loading.batch_transport import Sender

_SHORT_BYTES = 2**16


class Kind(Enum):
    """What a message says."""

    BATCH = "batch"
    END = "end"
    """The pass is over: there is no more data."""
    LEFT = "left"
    """The pass is over: the loop was left early."""
    ERROR = "error"


class Message(NamedTuple):
    kind: Kind
    content: object
    """The batch, or the fields of an error."""
    position: Mapping[str, Any] | None
    """The state of the loader behind this batch."""


class Round(NamedTuple):
    """What every data-parallel rank is told next."""

    own: Message
    """For the rank that reads."""
    packed: list[Pieces | None]
    """For each part of the mesh, where it has ranks that do not read."""

    @property
    def is_last(self) -> bool:
        return self.own.kind is not Kind.BATCH


class QuickReader(Iterator[Round]):
    """Reads and sends one round ahead of the loop that takes them, so that nobody waits for it."""

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
        """Nothing: it reads only when it is asked."""

    def end(self) -> bool:
        """Returns whether the last message of the pass was sent."""
        return self._has_sent_last

    def _read(self) -> tuple[Round, bool]:
        one = next(self._rounds)
        # A long one does not fit into the buffers of the system: it is sent when the others are there to receive it.
        is_short = all(sum(map(len, pieces)) <= _SHORT_BYTES for pieces in one.packed if pieces is not None)
        if is_short:
            self._send(one)
        return one, is_short

    def _send(self, one: Round) -> None:
        self._sender.send(one.packed)
        self._has_sent_last = one.is_last


class ThreadedReader(Iterator[Round]):
    """A thread that reads rounds and sends them, at most so many ahead of the loop that takes them."""

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
        self._free_places.release()

    def end(self) -> bool:
        """Stop; returns whether the last message of the pass was sent."""
        self.request_end()
        self._thread.join()
        return self._has_sent_last

    def _work(self) -> None:
        try:
            while not self._has_sent_last and self._waits_for_place():
                one = next(self._rounds)
                if self._is_to_end and not one.is_last:
                    return
                self._sender.send(one.packed)
                self._has_sent_last = one.is_last
                self._ready.put(one)
        except BaseException as error:  # noqa: BLE001 - raised where the loop takes the next round
            self._ready.put(error)

    def _waits_for_place(self) -> bool:
        """Whether there is one, and not the end."""
        self._free_places.acquire()
        return not self._is_to_end
