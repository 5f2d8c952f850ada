"""Stores in which ranks and launchers meet: a file on a single node, or a TCP store on one address.

torchrun restarts the workers of a failed job and may pass them the same store. It still contains the addresses of the
dead workers, and new workers would try to connect to them. `fresh_store` returns one with a key prefix that no earlier
attempt has used. `DistributedEnvironment` calls `job_store` before `init_process_group`.
"""

import contextlib
import errno
import ipaddress
import json
import logging
import os
import socket
import time
import uuid
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from forgather._job_secret import SealedStore, given_secret

logger = logging.getLogger(__name__)

STORE_VARIABLE = "FORGATHER_STORE"
"""Environment variable of workers on a single node: the file in which they meet."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")

_FOLDER = "forgather/attempt"
_POLL_SECONDS = 0.02
_BACKLOG = 2048


def job_store(rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return the store that the launcher's variables name; rank 0 hosts it if the launcher does not."""
    path = os.environ.get(STORE_VARIABLE)
    if path is not None:
        store: Store = FileStore(path, -1)
    elif rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = host_store(host, port, timeout, world_size=world_size)
    else:
        store, rank, world_size = next(rendezvous("env://", rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    if path is None and restarts_share_a_store():
        return fresh_store(store, rank, world_size, timeout)
    return store


def host_store(host: str, port: int, timeout: timedelta, **options: Any) -> TCPStore:
    """Return a new TCP store that listens on the address of `host` only.

    It listens on all addresses of this machine if the name stands for several, for none of this machine, or for its
    loopback address where other machines may know it by another one.
    """
    descriptor = _listen_on(host, port)
    if descriptor is None:
        logger.warning(
            "The store of the job listens on all addresses of this machine, because %s names no single one of it. Give an IP "
            "address instead of the name, or close port %d to other hosts.",
            host,
            port,
        )
    else:
        options["master_listen_fd"] = descriptor
    return TCPStore(host, port, is_master=True, multi_tenant=True, timeout=timeout, **options)


def _listen_on(host: str, port: int) -> int | None:
    """Return a listening socket on the only address of a name; None if there is no such address."""
    address = _only_address(host)
    if address is None:
        return None
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                # The address of a load balancer or of a container's host.
                return None
            raise
        listener.listen(_BACKLOG)
        return listener.detach()


def _only_address(host: str) -> str | None:
    # An unknown name is an error that torch describes.
    with contextlib.suppress(socket.gaierror):
        found = {str(one[4][0]) for one in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
        # Like the clients of torch, which try IPv6 first.
        addresses = sorted(found, key=lambda one: ":" not in one)
        if host in LOOPBACK:
            return addresses[0]
        if len(addresses) == 1 and not ipaddress.ip_address(addresses[0]).is_loopback:
            return addresses[0]
    return None


def restarts_share_a_store() -> bool:
    """Return whether the elastic launcher of torch (torchrun) started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def fresh_store(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return a `PrefixStore` that only the ranks of this attempt use; collective.

    Restart counters are not usable as a prefix, because the nodes of a job count restarts differently. Instead each
    rank writes a random mark. Rank 0 publishes a roster: a prefix, and the marks of all ranks. A rank accepts the
    prefix if the roster contains its mark, because only a live rank 0 can have read it.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    mark = uuid.uuid4().hex
    sealed = SealedStore(store, given_secret())
    sealed.set(f"{_FOLDER}/mark/{rank}", mark)
    if rank == 0:
        return PrefixStore(_gather_marks(sealed, world_size, deadline), store)
    while True:
        _check(deadline, world_size)
        if (found := sealed.find(f"{_FOLDER}/roster")) is not None:
            roster = json.loads(found)
            # A roster of an earlier attempt may be from a smaller job, so this index may not exist in it.
            if roster["marks"][rank : rank + 1] == [mark]:
                sealed.set(f"{roster['name']}/seen/{rank}", "")
                return PrefixStore(roster["name"], store)
        time.sleep(_POLL_SECONDS)


def _gather_marks(store: SealedStore, world_size: int, deadline: float) -> str:
    """Publish the roster until every rank has seen it; return the prefix."""
    name = f"{_FOLDER}/{uuid.uuid4().hex}"
    keys = [f"{_FOLDER}/mark/{rank}" for rank in range(world_size)]
    seen = [f"{name}/seen/{rank}" for rank in range(1, world_size)]
    published: list[str] = []
    while True:
        _check(deadline, world_size)
        if store.check(keys):
            marks = [store.get(key).decode() for key in keys]
            # The first marks read may be from dead workers. Publish again whenever a new worker overwrites its mark.
            if marks != published:
                store.set(f"{_FOLDER}/roster", json.dumps({"name": name, "marks": marks}))
                published = marks
            if not seen or store.check(seen):
                return name
        time.sleep(_POLL_SECONDS)


def _check(deadline: float, world_size: int) -> None:
    if time.monotonic() > deadline:
        raise RuntimeError(
            f"Not all {world_size} ranks of this job started in time. See the output of the other ranks. With more than one "
            "node, check that all nodes were started with the same rendezvous endpoint."
        )
