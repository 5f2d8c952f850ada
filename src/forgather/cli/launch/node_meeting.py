"""Rendezvous of nodes at the address of node 0, with progress messages while nodes are missing.

Torch's handlers block inside C++, where Python handles no signals and cannot print. `wait_in_thread` therefore runs the
rendezvous in a thread and keeps the main thread free. Called by the agent for jobs with more than one node.
"""

import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import DistError, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

T = TypeVar("T")

FIRST_LINE_SECONDS = 2.0
LINE_SECONDS = 10.0
_TIMEOUT_SECONDS = 900
_POLL_SECONDS = 0.2
_SILENCE_SECONDS = 5.0
"""A node without a heartbeat for this long has left."""
_RUN_ID = "forgather"


class NodeMeeting(RendezvousHandler):
    """Rendezvous handler that counts the missing nodes."""

    def __init__(self, endpoint: str, num_nodes: int, node_rank: int) -> None:
        self.endpoint = endpoint
        self._num_nodes = num_nodes
        self._node_rank = node_rank

    @abstractmethod
    def num_missing(self) -> int | None:
        """Return the number of nodes that have not joined, or None without a connection to node 0."""

    def waiting_for(self) -> str:
        missing = self.num_missing()
        if missing is None:
            return f"waiting for node 0 at {self.endpoint}"
        return f"waiting for {missing} more node{'s' if missing != 1 else ''} at {self.endpoint}"

    def get_run_id(self) -> str:
        return _RUN_ID

    def _retried(self, connect: Callable[[], T], failure: type[Exception], deadline: float) -> T:
        """Connect to node 0 and retry until the deadline: node 0 may start later than this node."""
        while True:
            try:
                return connect()
            except failure:
                # Node 0 hosts the store: its failure is local, such as a port in use, and a retry would not help.
                if self._node_rank == 0:
                    raise
                if time.monotonic() > deadline:
                    raise self._timeout_error() from None
                time.sleep(_POLL_SECONDS)

    def _timeout_error(self) -> TimeoutError:
        missing = self.num_missing()
        who = f"{missing} of {self._num_nodes} nodes" if missing is not None else "node 0"
        return TimeoutError(
            f"{who} did not join at --rdzv-endpoint {self.endpoint} within {_TIMEOUT_SECONDS} s. Start the same command on "
            f"all --nnodes {self._num_nodes} nodes, each with its own --node-rank from 0 to {self._num_nodes - 1}, and check "
            "that every node can reach this address of node 0."
        )


class NumberedMeeting(NodeMeeting):
    """Rendezvous that keeps the given node ranks; it happens once, for a job without restarts."""

    def __init__(self, endpoint: str, num_nodes: int, node_rank: int) -> None:
        super().__init__(endpoint, num_nodes, node_rank)
        host, _, port = endpoint.rpartition(":")
        self._address = (host, int(port))
        self._server: TCPStore | None = None
        self._missing: int | None = None
        self._seen: dict[int, tuple[bytes, float]] = {}

    def num_missing(self) -> int | None:
        return self._missing

    def next_rendezvous(self) -> RendezvousInfo:
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        store = self._connected(deadline)
        number = 0
        while self._missing != 0:
            number += 1
            try:
                self._missing = self._show_presence(store, number)
            except DistError:
                if self._node_rank == 0:
                    raise
                # Node 0 has exited; it may be started again.
                self._missing = None
                store = self._connected(deadline)
            if self._missing != 0:
                if time.monotonic() > deadline:
                    raise self._timeout_error()
                time.sleep(_POLL_SECONDS)
        return RendezvousInfo(store, self._node_rank, self._num_nodes, RendezvousStoreInfo(*self._address))

    def _show_presence(self, store: Store, number: int) -> int:
        """Publish that this node is alive; returns the number of nodes that node 0 is missing."""
        store.set(f"alive/{self._node_rank}", str(number))
        if self._node_rank != 0:
            # Only node 0 counts, so that all nodes leave the rendezvous on the same answer. `get` blocks until node 0
            # has published one.
            return int(store.get("missing"))
        missing = sum(not self._is_alive(store, rank) for rank in range(1, self._num_nodes))
        store.set("missing", str(missing))
        return missing

    def _is_alive(self, store: Store, rank: int) -> bool:
        """Return whether a node has changed its heartbeat counter recently."""
        key, now = f"alive/{rank}", time.monotonic()
        if not store.check([key]):
            return False
        # Heartbeats are counters and not times, since clocks of nodes differ.
        value = store.get(key)
        before, since = self._seen.get(rank, (b"", now))
        if value != before:
            self._seen[rank] = (value, now)
            return True
        return now - since < _SILENCE_SECONDS

    def _connected(self, deadline: float) -> Store:
        """Return the store that node 0 hosts; other nodes retry until the deadline."""
        host, port = self._address

        def connect() -> TCPStore:
            return TCPStore(
                host,
                port,
                is_master=self._node_rank == 0,
                timeout=timedelta(seconds=max(deadline - time.monotonic(), 1)),
                wait_for_workers=False,
                multi_tenant=True,
            )

        # Keep a reference: the server on node 0 stops when the object is collected.
        self._server = self._retried(connect, DistError, deadline)
        # The agent keeps its own keys in the same store.
        return PrefixStore(_RUN_ID, self._server)

    def get_backend(self) -> str:
        return "static"

    @property
    def use_agent_store(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


class RepeatedMeeting(NodeMeeting):
    """Torch's elastic rendezvous, which can be repeated after a failure and assigns the node ranks itself."""

    def __init__(self, endpoint: str, num_nodes: int, node_rank: int) -> None:
        super().__init__(endpoint, num_nodes, node_rank)
        self._handler: RendezvousHandler | None = None

    def num_missing(self) -> int | None:
        if self._handler is None:
            return None
        # Torch exposes the participants in a private attribute only. Without it, only this node is known to have
        # joined.
        state = getattr(getattr(self._handler, "_state_holder", None), "state", None)
        return self._num_nodes - max(len(getattr(state, "participants", ())), 1)

    def next_rendezvous(self) -> RendezvousInfo:
        if self._handler is None:
            self._handler = self._connected()
        return self._handler.next_rendezvous()

    def _connected(self) -> RendezvousHandler:
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        details: dict[str, Any] = {"is_host": self._node_rank == 0, "timeout": _TIMEOUT_SECONDS}
        parameters = RendezvousParameters(
            "c10d", self.endpoint, _RUN_ID, self._num_nodes, self._num_nodes, local_addr=None, **details
        )
        return self._retried(lambda: get_rendezvous_handler(parameters), RendezvousConnectionError, deadline)

    def get_backend(self) -> str:
        return "c10d"

    @property
    def use_agent_store(self) -> bool:
        return self._handler is None or self._handler.use_agent_store

    def is_closed(self) -> bool:
        return self._handler is not None and self._handler.is_closed()

    def set_closed(self) -> None:
        if self._handler is not None:
            self._handler.set_closed()

    def num_nodes_waiting(self) -> int:
        return 0 if self._handler is None else self._handler.num_nodes_waiting()

    def shutdown(self) -> bool:
        return True if self._handler is None else self._handler.shutdown()


def wait_in_thread(work: Callable[[], None], meeting: NodeMeeting) -> None:
    """Run blocking work in a thread, and print every ten seconds how many nodes are missing.

    A signal interrupts the wait at once.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again below, in the thread that waits
            errors.append(error)

    # A daemon thread, because a blocked thread cannot be stopped: it must not keep the process alive after a signal.
    thread = threading.Thread(target=run, name="rendezvous", daemon=True)
    started = time.monotonic()
    next_line = FIRST_LINE_SECONDS
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
        seconds = time.monotonic() - started
        if thread.is_alive() and seconds >= next_line:
            print(f"{meeting.waiting_for()} ({seconds:.0f} s)", file=sys.stderr, flush=True)
            next_line += LINE_SECONDS
    if errors:
        raise errors[0]
