"""Rendezvous of a single node without a network, and of nodes at the address of node 0.

Messages between nodes are signed with the job secret, and never pickled. Torch's handlers block inside C++, where Python
handles no signals and cannot print. `wait_in_thread` therefore runs a rendezvous of nodes in a thread, keeps the main thread
free, and prints how many nodes are missing. The agent calls it.
"""

import json
import os
import secrets
import socket
import threading
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import DistError, HashStore, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname
from torch.distributed.elastic.utils.distributed import get_free_port

from forgather._job_secret import SECRET_VARIABLE, SealedStore, describe_source, hand_to_workers
from forgather.cli.launch.sealed_state import SealedHandler, SealedState
from forgather.cli.output import note
from forgather.ml.distributed.rendezvous import LOOPBACK, STORE_VARIABLE, host_store

T = TypeVar("T")

FIRST_LINE_SECONDS = 2.0
LINE_SECONDS = 10.0
_TIMEOUT_SECONDS = 900
_READ_TIMEOUT = timedelta(seconds=60)
_POLL_SECONDS = 0.2
_SILENCE_SECONDS = 5.0
"""A node without a heartbeat for this long has left."""
_RUN_ID = "forgather"


class LocalMeeting(RendezvousHandler):
    """Rendezvous of a job on this node alone: its ranks meet in a file that only this user can open."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._run_id = str(uuid.uuid4())
        self._num_rounds = 0

    def next_rendezvous(self) -> RendezvousInfo:
        self._num_rounds += 1
        # A new file for each attempt: an old one has the addresses of dead ranks. Workers inherit the variable.
        os.environ[STORE_VARIABLE] = str(self._folder / f"store-{self._num_rounds}")
        # The port is for programs that open a store of their own.
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("localhost", get_free_port()))

    def get_backend(self) -> str:
        return "static"

    @property
    def use_agent_store(self) -> bool:
        return False

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


class NodeMeeting(RendezvousHandler):
    """Rendezvous handler that counts the missing nodes."""

    def __init__(self, endpoint: str, num_nodes: int, node_rank: int) -> None:
        self.endpoint = endpoint
        self._num_nodes = num_nodes
        self._node_rank = node_rank
        host, _, port = endpoint.rpartition(":")
        self._address = (host.strip("[]"), int(port))
        self._source_of_secret = describe_source()
        self._key = hand_to_workers()
        self._server: TCPStore | None = None
        self._finds_other_secrets = False

    @abstractmethod
    def num_missing(self) -> int | None:
        """Return the number of nodes that have not joined, or None without a connection to node 0."""

    @property
    def finds_other_secrets(self) -> bool:
        """Whether the store holds messages that are not signed with the secret of this node."""
        return self._finds_other_secrets

    def waiting_for(self) -> str:
        missing = self.num_missing()
        if missing is None:
            return f"waiting for node 0 at {self.endpoint}"
        return f"waiting for {missing} more node{'s' if missing != 1 else ''} at {self.endpoint}"

    def sealed(self, store: Store, context: str = "") -> SealedStore:
        """Return the store with values that are signed with the secret of this node."""
        return SealedStore(store, self._key, context)

    def _open_store(self, is_host: bool, timeout: timedelta) -> TCPStore:
        if is_host:
            return host_store(*self._address, timeout, wait_for_workers=False)
        return TCPStore(*self._address, is_master=False, wait_for_workers=False, timeout=timeout)

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
            f"that every node can reach this address of node 0.{self.remedy_for_secrets()}"
        )

    def remedy_for_secrets(self) -> str:
        """Return a sentence about messages with another secret; nothing if there are none."""
        if not self.finds_other_secrets:
            return ""
        return (
            " Messages there are ignored, because they are not signed with the secret of this node "
            f"({self._source_of_secret}). If they are from the other nodes, copy that file to them, or set {SECRET_VARIABLE} "
            "to the same text on all nodes."
        )


class NumberedMeeting(NodeMeeting):
    """Rendezvous that keeps the given node ranks; it happens once, for a job without restarts."""

    def __init__(self, endpoint: str, num_nodes: int, node_rank: int) -> None:
        super().__init__(endpoint, num_nodes, node_rank)
        self._missing: int | None = None
        self._seen: dict[int, tuple[int, float]] = {}
        self._mark = secrets.token_hex(16)
        """Name of this process in its messages, which are worth nothing if they are played back to another."""
        self._mark_of_host = self._mark if node_rank == 0 else ""

    def num_missing(self) -> int | None:
        return self._missing

    def next_rendezvous(self) -> RendezvousInfo:
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        store = self._connected(deadline)
        number = 0
        while self._missing != 0:
            number += 1
            try:
                self._missing = self._show_presence(self.sealed(store), number)
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
        # The agent keeps its own keys in the same store.
        agents: Any = self.sealed(store, self._mark_of_host)
        return RendezvousInfo(agents, self._node_rank, self._num_nodes, RendezvousStoreInfo(*self._address))

    def _show_presence(self, store: SealedStore, number: int) -> int | None:
        """Publish that this node is alive; returns the number of nodes that node 0 is missing, None without its answer."""
        presence = {"number": number, "mark": self._mark, "host": self._mark_of_host}
        store.set(f"alive/{self._node_rank}", json.dumps(presence))
        if self._node_rank != 0:
            # Only node 0 counts, so that all nodes leave the rendezvous on the same answer.
            return self._count_of_host(store)
        marks = [self._mark, *(self._mark_of(store, rank) for rank in range(1, self._num_nodes))]
        missing = marks.count(None)
        store.set("missing", json.dumps({"missing": missing, "host": self._mark, "marks": marks}))
        return missing

    def _count_of_host(self, store: SealedStore) -> int | None:
        found = store.find("missing")
        self._finds_other_secrets = found is None and store.is_set("missing")
        if found is None:
            return None
        answer = json.loads(found)
        self._mark_of_host = answer["host"]
        missing: int = answer["missing"]
        # Without the mark of this process, the count is of an earlier start of this node, or of another job.
        own = answer["marks"][self._node_rank : self._node_rank + 1]
        return missing if missing or own == [self._mark] else 1

    def _mark_of(self, store: SealedStore, rank: int) -> str | None:
        """Return the mark of a node that has changed its heartbeat counter recently and knows this host; None otherwise."""
        name, now = f"alive/{rank}", time.monotonic()
        found = store.find(name)
        self._finds_other_secrets = self._finds_other_secrets or (found is None and store.is_set(name))
        presence = {} if found is None else json.loads(found)
        if presence.get("host") != self._mark:
            return None
        # Heartbeats are counters and not times, since clocks of nodes differ.
        before, since = self._seen.get(rank, (0, now))
        if presence["number"] != before:
            since = now
            self._seen[rank] = (presence["number"], since)
        mark: str = presence["mark"]
        return mark if now - since < _SILENCE_SECONDS else None

    def _connected(self, deadline: float) -> Store:
        """Return the store that node 0 hosts; other nodes retry until the deadline."""
        limit = timedelta(seconds=max(deadline - time.monotonic(), 1))
        # Keep a reference: the server on node 0 stops when the object is collected.
        self._server = self._retried(lambda: self._open_store(self._node_rank == 0, limit), DistError, deadline)
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

    _is_host: bool | None
    """Whether this node hosts the store; None: if the endpoint is an address of this machine, and nobody else does."""

    def __init__(self, endpoint: str, num_nodes: int, node_rank: int) -> None:
        super().__init__(endpoint, num_nodes, node_rank)
        self._is_host = node_rank == 0
        self._max_nodes = num_nodes
        self._handler: SealedHandler | None = None

    def num_missing(self) -> int | None:
        if self._handler is None:
            return None
        # Torch exposes the participants in a private attribute only. Without it, only this node is known to have
        # joined.
        return self._num_nodes - max(len(getattr(self._state, "participants", ())), 1)

    @property
    def _state(self) -> Any:
        return getattr(getattr(self._handler, "_state_holder", None), "state", None)

    def next_rendezvous(self) -> RendezvousInfo:
        # Rank 0 of each attempt hosts the store of the ranks: one that outlived it would have addresses of dead ranks.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        if self._handler is None:
            self._handler = self._connected()
        return self._handler.next_rendezvous()

    @property
    def finds_other_secrets(self) -> bool:
        return self._handler is not None and self._handler.shared_state.is_foreign

    def _connected(self) -> SealedHandler:
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        return self._retried(
            lambda: self._handler_over(timeout=RendezvousTimeout()), RendezvousConnectionError, deadline
        )

    def _handler_over(self, **options: Any) -> SealedHandler:
        self._server = store = self._shared_store()
        state = SealedState(store, self._key)
        handler: SealedHandler = SealedHandler.from_backend(
            _RUN_ID, store, state, self._num_nodes, self._max_nodes, self._own_address, **options
        )
        handler.shared_state = state
        return handler

    def _shared_store(self) -> TCPStore:
        host = self._address[0]
        is_host = _matches_machine_hostname(host) if self._is_host is None else self._is_host
        try:
            return self._open_store(is_host, _READ_TIMEOUT)
        except (DistError, OSError) as error:
            if not is_host or self._is_host is not None:
                raise RendezvousConnectionError(
                    f"No connection to the rendezvous at {self.endpoint}: {error}"
                ) from error
            # Another node on this machine hosts it.
            return self._open_store(False, _READ_TIMEOUT)

    @property
    def _own_address(self) -> str | None:
        """Return the address of this node on the interface towards the endpoint; None: only its host name is known."""
        host, port = self._address
        if host in LOOPBACK:
            return host
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as way:
                # Sends nothing: it only selects the interface.
                way.connect(address)
                own: str = way.getsockname()[0]
        except OSError:
            return None
        # On some machines the own host name means 127.0.1.1, which is no address for other nodes.
        return None if own.startswith("127.") or own == "::1" else own

    def get_backend(self) -> str:
        return "c10d"

    @property
    def use_agent_store(self) -> bool:
        return False

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
            line = f"{meeting.waiting_for()} ({seconds:.0f} s).{meeting.remedy_for_secrets()}"
            note(line if meeting.finds_other_secrets else line.rstrip("."))
            next_line += LINE_SECONDS
    if errors:
        raise errors[0]
