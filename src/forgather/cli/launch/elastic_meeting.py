"""Elastic rendezvous (--nnodes MIN:MAX): any number of nodes in the range, with heartbeats that show lost nodes.

Torch's rendezvous assigns the node ranks. A job starts when MAX nodes have joined, or --node-wait seconds after MIN have.
Invariant: the keys of a round have their own prefix, so that nodes of an earlier round cannot be taken for members.
`ElasticAgent` calls it.
"""

import time
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousInfo, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout, _RendezvousExitOp

from forgather._job_secret import SealedStore
from forgather.cli.launch.node_meeting import RepeatedMeeting
from forgather.cli.launch.sealed_state import SealedHandler
from forgather.cli.launch.store_guard import StoreGuard

_LEAVE_SECONDS = 5
_LAST_SECONDS = 30
"""A host that is lost this shortly before the end of the wait has given up waiting itself."""
_HEARTBEAT_SECONDS = 3
_MISSED_HEARTBEATS = 5
"""A node without a heartbeat for 15 seconds is lost, and the others stop waiting for it."""


class ElasticMeeting(RepeatedMeeting):
    """Rendezvous of `min_nodes` to `max_nodes` nodes; node 0, if any node has this rank, hosts the store."""

    def __init__(
        self, endpoint: str, min_nodes: int, max_nodes: int, node_rank: int | None, node_wait: int, node_timeout: int
    ) -> None:
        super().__init__(endpoint, min_nodes, -1 if node_rank is None else node_rank)
        self._max_nodes = max_nodes
        self._is_host = None if node_rank is None else node_rank == 0
        self._node_wait = node_wait
        self._node_timeout = node_timeout
        self._deadline = 0.0
        self._guard: StoreGuard | None = None

    @property
    def members(self) -> frozenset[str]:
        """Names of the nodes of the current round."""
        # Copied first, because the thread of the heartbeats may change the dictionary.
        return frozenset(map(str, tuple(getattr(self._state, "participants", ()))))

    @property
    def num_joined(self) -> int:
        """Number of nodes that wait for the next round, this node included."""
        # The participants of a completed round include lost nodes; those that are left join its wait list.
        is_complete = getattr(self._state, "complete", False)
        return max(len(getattr(self._state, "wait_list" if is_complete else "participants", ())), 1)

    def num_missing(self) -> int | None:
        return None if self._handler is None else max(self._num_nodes - self.num_joined, 0)

    def waiting_for(self) -> str:
        missing = self.num_missing()
        if missing == 0:
            return f"{self.num_joined} of at most {self._max_nodes} nodes joined at {self.endpoint}, waiting for more"
        joined = f"{self.num_joined} of at least {self._num_nodes} nodes" if missing else "no connection"
        return f"{joined} at {self.endpoint}; waiting {self._seconds_left:.0f} s more"

    def next_rendezvous(self) -> RendezvousInfo:
        self._deadline = time.monotonic() + self._node_timeout
        try:
            return super().next_rendezvous()
        except RendezvousTimeoutError:
            raise self._timeout_error() from None
        except RendezvousConnectionError:
            if self._seconds_left > _LAST_SECONDS:
                raise
            raise self._timeout_error() from None

    def leave(self) -> None:
        """Take this node out of the round, so that the others need not wait until its heartbeat has expired."""
        handler: Any = self._handler
        self._farewells.set(str(handler._this_node), "")
        handler._stop_heartbeats()
        handler._op_executor.run(_RendezvousExitOp(), time.monotonic() + _LEAVE_SECONDS)

    def has_left(self, node: str) -> bool:
        """Return whether a former member has left on request; its workers saved with all others."""
        return self._farewells.find(node) is not None

    def shutdown(self) -> bool:
        if self._guard is not None:
            self._guard.stop()
        return super().shutdown()

    @property
    def _farewells(self) -> SealedStore:
        handler: Any = self._handler
        return self.sealed(PrefixStore("forgather/left", handler._store))

    @property
    def _seconds_left(self) -> float:
        return max(self._deadline - time.monotonic(), 0.0)

    def _timeout_error(self) -> TimeoutError:
        return TimeoutError(
            f"Fewer than {self._num_nodes} nodes met at --rdzv-endpoint {self.endpoint} within {self._node_timeout} s "
            f"(--node-timeout). Start the same command on at least {self._num_nodes} nodes, and check that every node can "
            f"reach this address. The job resumes from its newest checkpoint, if it has one.{self.remedy_for_secrets()}"
        )

    def _connected(self) -> SealedHandler:
        timeout = RendezvousTimeout(
            timedelta(seconds=self._node_timeout), timedelta(seconds=max(self._node_wait, 0.001))
        )
        handler = self._retried(
            lambda: self._handler_over(
                timeout=timeout, keep_alive_interval=_HEARTBEAT_SECONDS, keep_alive_max_attempt=_MISSED_HEARTBEATS
            ),
            RendezvousConnectionError,
            self._deadline,
        )
        self._guard = StoreGuard(*self._address)
        return handler
