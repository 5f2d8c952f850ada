"""Rendezvous of several nodes: they meet at the address of node 0, and say how many are missing while they wait.

Torch's own handlers wait inside of C++, where no signal is noticed and nothing can be printed. Here the waiting happens
in a thread (`wait_in_thread`), so that the main thread is free for both.
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
"""A node that has not shown itself for so long has left again."""
_RUN_ID = "forgather"


class NodeMeeting(RendezvousHandler):
    """A rendezvous handler that knows how many nodes it waits for."""

    def __init__(self, endpoint: str, num_nodes: int, node_rank: int) -> None:
        self.endpoint = endpoint
        self._num_nodes = num_nodes
        self._node_rank = node_rank

    @abstractmethod
    def num_missing(self) -> int | None:
        """The number of nodes that have not come yet; None while there is no contact with node 0."""

    def waiting_for(self) -> str:
        missing = self.num_missing()
        if missing is None:
            return f"waiting for node 0 at {self.endpoint}"
        return f"waiting for {missing} more node{'s' if missing != 1 else ''} at {self.endpoint}"

    def get_run_id(self) -> str:
        return _RUN_ID

    def _retried(self, connect: Callable[[], T], failure: type[Exception], deadline: float) -> T:
        """Connect to node 0, trying again until the deadline: it may start later than this node."""
        while True:
            try:
                return connect()
            except failure:
                if self._node_rank == 0:
                    raise
                if time.monotonic() > deadline:
                    raise self._timeout_error() from None
                time.sleep(_POLL_SECONDS)

    def _timeout_error(self) -> TimeoutError:
        missing = self.num_missing()
        who = f"{missing} of {self._num_nodes} nodes" if missing is not None else "node 0"
        return TimeoutError(
            f"{who} did not come to --rdzv-endpoint {self.endpoint} within {_TIMEOUT_SECONDS} s. Start the same command on "
            f"each of the --nnodes {self._num_nodes} nodes, each with its own --node-rank from 0 to {self._num_nodes - 1}, and "
            "check that all of them reach that address, which is one of node 0."
        )


class NumberedMeeting(NodeMeeting):
    """Nodes have the numbers that they were told; they meet once, for a job that is not started again."""

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
                # Node 0 has left; it may be started again.
                self._missing = None
                store = self._connected(deadline)
            if self._missing != 0:
                if time.monotonic() > deadline:
                    raise self._timeout_error()
                time.sleep(_POLL_SECONDS)
        return RendezvousInfo(store, self._node_rank, self._num_nodes, RendezvousStoreInfo(*self._address))

    def _show_presence(self, store: Store, number: int) -> int:
        """Let the others see that this node is here; returns how many node 0 misses."""
        store.set(f"alive/{self._node_rank}", str(number))
        if self._node_rank != 0:
            return int(store.get("missing"))
        missing = sum(not self._is_alive(store, rank) for rank in range(1, self._num_nodes))
        store.set("missing", str(missing))
        return missing

    def _is_alive(self, store: Store, rank: int) -> bool:
        key, now = f"alive/{rank}", time.monotonic()
        if not store.check([key]):
            return False
        value = store.get(key)
        before, since = self._seen.get(rank, (b"", now))
        if value != before:
            self._seen[rank] = (value, now)
            return True
        return now - since < _SILENCE_SECONDS

    def _connected(self, deadline: float) -> Store:
        """The store that node 0 hosts; other nodes try to reach it until the deadline."""
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

        self._server = self._retried(connect, DistError, deadline)
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
    """Torch's elastic rendezvous, which brings nodes together again after a failure, and numbers them itself."""

    def __init__(self, endpoint: str, num_nodes: int, node_rank: int) -> None:
        super().__init__(endpoint, num_nodes, node_rank)
        self._handler: RendezvousHandler | None = None

    def num_missing(self) -> int | None:
        if self._handler is None:
            return None
        # Torch keeps the nodes that it has seen to itself; without them it is known only that this one is here.
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
    """Do work that waits for other nodes, and say every ten seconds for how many; a signal ends the waiting at once."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again below, in the thread that waits
            errors.append(error)

    # A daemon, because it cannot be ended: it is left behind when a signal ends the program.
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
