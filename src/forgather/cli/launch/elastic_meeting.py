"""Elastic rendezvous (--nnodes MIN:MAX): any number of nodes in the range, with heartbeats that show lost nodes.

Torch's rendezvous assigns the node ranks. A job starts when MAX nodes have joined, or --node-wait seconds after MIN have.
Invariant: the keys of a round have their own prefix, so that nodes of an earlier round cannot be taken for members.
`ElasticAgent` calls it.
"""

import os
import time
from typing import Any

from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from forgather.cli.launch.node_meeting import RepeatedMeeting

_JOIN_SECONDS = 900
_HEARTBEAT_SECONDS = 3
_MISSED_HEARTBEATS = 5
"""A node without a heartbeat for 15 seconds is lost, and the others stop waiting for it."""
_RUN_ID = "forgather"
_LOOPBACK = ("localhost", "127.0.0.1", "::1", "[::1]")


class ElasticMeeting(RepeatedMeeting):
    """Rendezvous of `min_nodes` to `max_nodes` nodes; node 0, if any node has this rank, hosts the store."""

    def __init__(self, endpoint: str, min_nodes: int, max_nodes: int, node_rank: int | None, node_wait: int) -> None:
        super().__init__(endpoint, min_nodes, -1 if node_rank is None else node_rank)
        self._max_nodes = max_nodes
        self._is_host = None if node_rank is None else node_rank == 0
        self._node_wait = node_wait

    @property
    def members(self) -> frozenset[str]:
        """Names of the nodes of the current round."""
        return frozenset(map(str, getattr(self._state, "participants", ())))

    def num_missing(self) -> int | None:
        missing = super().num_missing()
        return None if missing is None else max(missing, 0)

    def waiting_for(self) -> str:
        if self.num_missing() == 0:
            return f"{len(self.members)} of at most {self._max_nodes} nodes joined at {self.endpoint}, waiting for more"
        return super().waiting_for()

    def next_rendezvous(self) -> RendezvousInfo:
        try:
            return super().next_rendezvous()
        except RendezvousTimeoutError:
            raise self._timeout_error() from None

    def _timeout_error(self) -> TimeoutError:
        return TimeoutError(
            f"Fewer than {self._num_nodes} nodes met at --rdzv-endpoint {self.endpoint} within {_JOIN_SECONDS} s. Start the "
            f"same command on at least {self._num_nodes} nodes, and check that every node can reach this address."
        )

    @property
    def _state(self) -> Any:
        return getattr(getattr(self._handler, "_state_holder", None), "state", None)

    def _connected(self) -> RendezvousHandler:
        # With a shared store, torch caches the address of the first round. It is wrong when another node becomes rank 0.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        details: dict[str, Any] = {
            "join_timeout": _JOIN_SECONDS,
            "last_call_timeout": self._node_wait,
            "keep_alive_interval": _HEARTBEAT_SECONDS,
            "keep_alive_max_attempt": _MISSED_HEARTBEATS,
        }
        if self._is_host is not None:
            details["is_host"] = self._is_host
        parameters = RendezvousParameters(
            "c10d", self.endpoint, _RUN_ID, self._num_nodes, self._max_nodes, local_addr=self._own_address, **details
        )
        deadline = time.monotonic() + _JOIN_SECONDS
        return self._retried(lambda: get_rendezvous_handler(parameters), RendezvousConnectionError, deadline)

    @property
    def _own_address(self) -> str | None:
        """Return the address of this node for the other nodes; None: the host name."""
        host = self.endpoint.rpartition(":")[0]
        return host.strip("[]") if host in _LOOPBACK else None
