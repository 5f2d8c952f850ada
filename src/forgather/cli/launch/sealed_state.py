"""State of torch's elastic rendezvous as signed JSON in a store; torch's own backend shares a pickle.

`SealedState` gives torch only states that a launcher of this job has signed. Anything else in the store, such as a state of
another job of the same user, counts as a state that was lost: the last one of this job is used, and the next heartbeat
writes it again. `SealedHandler` signs what the agents exchange once they have met. Called by the meetings of nodes.
"""

import json
import pickle
import secrets
import time
from datetime import datetime
from typing import Any

from torch.distributed import DistError, Store
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    _NodeDesc,
    _RendezvousState,
)

from forgather._job_secret import SealedStore, seal, unseal

_KEY = "forgather/rendezvous"
_STALE_SECONDS = 300.0
"""A state that no node has renewed for this long is from an earlier job. Heartbeats renew it every few seconds."""


class SealedState(RendezvousBackend):
    """Backend of `DynamicRendezvousHandler`. A token is the stored value, with which a write must begin."""

    def __init__(self, store: Store, key: bytes) -> None:
        self._store = store
        self._secret = key
        self._known: dict[str, Any] = {"job": secrets.token_hex(16), "serial": 0, "at": 0.0, "state": None}
        """The newest signed state. The node that writes the first one names the job; a node that finds one joins this job."""
        self.is_foreign = False
        """Whether the store holds something that is not signed with the secret of this node."""

    def sealed(self, store: Store, context: str) -> SealedStore:
        """Return the store with values that are signed for this context."""
        return SealedStore(store, self._secret, context)

    @property
    def name(self) -> str:
        return "c10d"

    def get_state(self) -> "tuple[bytes, bytes] | None":
        try:
            stored = self._store.get(_KEY) if self._store.check([_KEY]) else b""
        except DistError as error:
            raise _lost() from error
        return self._seen(stored)

    def set_state(self, state: bytes, token: "bytes | None" = None) -> "tuple[bytes, bytes, bool] | None":
        # torch has made this pickle in this process.
        shared = _to_json(pickle.loads(state))
        content = {"job": self._known["job"], "serial": self._known["serial"] + 1, "at": time.time(), "state": shared}
        sealed = seal(self._secret, _KEY, json.dumps(content).encode())
        try:
            # torch has no type for binary values, and accepts them.
            compare_set: Any = self._store.compare_set
            stored: bytes = compare_set(_KEY, token or b"", sealed)
        except DistError as error:
            raise _lost() from error
        found = self._seen(stored)
        return None if found is None else (*found, stored == sealed)

    def _seen(self, stored: bytes) -> "tuple[bytes, bytes] | None":
        """Return the newest signed state, and what the store holds in its place, as the token."""
        opened = unseal(self._secret, _KEY, stored)
        self.is_foreign = bool(stored) and opened is None
        if opened is not None:
            content: dict[str, Any] = json.loads(opened)
            if self._known["state"] is None:
                is_believed = time.time() - content["at"] <= _STALE_SECONDS
            else:
                # An older state, or one of another job, that is written again counts as a forgery, too.
                is_believed = content["job"] == self._known["job"] and content["serial"] >= self._known["serial"]
            if is_believed:
                self._known = content
        state = self._known["state"]
        if state is None:
            # torch writes its first state over the token.
            return (pickle.dumps(_RendezvousState()), stored) if stored else None
        return pickle.dumps(_from_json(state)), stored


class SealedHandler(DynamicRendezvousHandler):
    """Torch's elastic rendezvous, with signed values in the store that it hands to the agents."""

    shared_state: SealedState

    def _get_store(self) -> Any:
        state = self._state_holder.state
        members = f"{state.round} {sorted(map(str, state.participants))}"
        return self.shared_state.sealed(super()._get_store(), members)


def _lost() -> RendezvousConnectionError:
    return RendezvousConnectionError("The connection to the store of the rendezvous has failed.")


def _to_json(state: _RendezvousState) -> dict[str, Any]:
    return {
        "round": state.round,
        "complete": state.complete,
        "deadline": None if state.deadline is None else state.deadline.isoformat(),
        "closed": state.closed,
        "participants": [[*_node(one), rank] for one, rank in state.participants.items()],
        "wait_list": [_node(one) for one in sorted(state.wait_list)],
        "redundancy_list": [_node(one) for one in sorted(state.redundancy_list)],
        "last_heartbeats": [[*_node(one), at.isoformat()] for one, at in state.last_heartbeats.items()],
    }


def _from_json(content: dict[str, Any]) -> _RendezvousState:
    state = _RendezvousState()
    state.round, state.complete, state.closed = content["round"], content["complete"], content["closed"]
    state.deadline = None if content["deadline"] is None else datetime.fromisoformat(content["deadline"])
    state.participants = {_NodeDesc(*node): rank for *node, rank in content["participants"]}
    state.wait_list = {_NodeDesc(*node) for node in content["wait_list"]}
    state.redundancy_list = {_NodeDesc(*node) for node in content["redundancy_list"]}
    state.last_heartbeats = {_NodeDesc(*node): datetime.fromisoformat(at) for *node, at in content["last_heartbeats"]}
    return state


def _node(one: _NodeDesc) -> list[str | int]:
    return [one.addr, one.pid, one.local_id]
