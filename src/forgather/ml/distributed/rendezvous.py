"""Stores in which ranks and launchers meet, and the ranks that are still missing.

On a single node the store is a file, else a TCP store on one address. Without a launcher nobody notices a rank that ends
before it joins, so the others say for which ranks they wait.

torchrun restarts the workers of a failed job and may pass them the same store. It still contains the addresses of the
dead workers, and new workers would try to connect to them. `fresh_store` returns one with a key prefix that no earlier
attempt has used. `DistributedEnvironment` calls these functions before `init_process_group`.
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

from torch._C._distributed_c10d import FileStore, PrefixStore, Store
from torch.distributed import TCPStore

from forgather._job_secret import SealedStore, given_secret
from forgather._watch.message import names

logger = logging.getLogger(__name__)

STORE_VARIABLE = "FORGATHER_STORE"
"""Environment variable of workers on a single node: the file in which they meet."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
SETUP_LIMIT = timedelta(minutes=10)
"""Time for all ranks to join, if the user sets no timeout. Collectives wait longer: a rank may work for that long."""
_ARRIVED = "forgather/arrived"
_NUM_ARRIVED = "forgather/num_arrived"
_FIRST_REPORT = 10.0
_MOST_SECONDS_BETWEEN_REPORTS = 60.0
_CONNECT_SECONDS = 2.0
_CONNECT_POLL_SECONDS = 0.2
_MOST_POLLS_PER_SECOND = 5000
"""Questions of all ranks to the store."""
_LONGER = "If it needs more time, pass a longer timeout to DistributedEnvironment, on all ranks."
_FOLDER = "forgather/attempt"
_POLL_SECONDS = 0.02
_BACKLOG = 2048

_store_file: str | None = None


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
    """Return a listening socket on the only address of a name, or on a loopback address; None if there is no such address."""
    unusable: OSError | None = None
    for address in _addresses(host):
        try:
            with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((address, port))
                listener.listen(_BACKLOG)
                return listener.detach()
        except OSError as error:
            # The address of a load balancer or of a container's host, or IPv6 is switched off.
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
            unusable = error
    if unusable is not None and host in LOOPBACK:
        raise OSError(
            f"The store of the job cannot listen on {host}: {unusable}. IPv6 may be switched off on this machine. Write "
            "127.0.0.1 instead, in MASTER_ADDR or --rdzv-endpoint."
        )
    return None


def _addresses(host: str) -> list[str]:
    """Return all addresses of a loopback name, else the only one; nothing if other machines may know the host by another."""
    # An unknown name is an error that torch describes.
    with contextlib.suppress(socket.gaierror):
        found = {str(one[4][0]) for one in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
        # Like the clients of torch, which try IPv6 first.
        addresses = sorted(found, key=lambda one: ":" not in one)
        if host in LOOPBACK or (len(addresses) == 1 and not ipaddress.ip_address(addresses[0]).is_loopback):
            return addresses
    return []


class _Waiting:
    """Wait for other ranks, with a limit, and with reports that become rarer."""

    def __init__(self, limit: timedelta) -> None:
        self._began = time.monotonic()
        self._limit = limit.total_seconds()
        self._next_report = _FIRST_REPORT

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @property
    def is_over(self) -> bool:
        return self.seconds >= self._limit

    @property
    def is_due(self) -> bool:
        """Whether the time for a report, or the end, has come."""
        return self.seconds >= self._next_report or self.is_over

    def report(self, who: str, is_told: bool = True) -> None:
        """Log for whom this rank waits; `is_told` is False if another rank says it."""
        self._next_report = self.seconds + min(max(self.seconds, _FIRST_REPORT), _MOST_SECONDS_BETWEEN_REPORTS)
        if is_told:
            logger.warning("waiting for %s (%.0f s)", who, self.seconds)


def store_file() -> str | None:
    """Return the file in which this worker meets the others; None if no launcher has given it one.

    The variable is removed: a program with ranks of its own that a worker starts would meet there, too.
    """
    global _store_file
    _store_file = os.environ.pop(STORE_VARIABLE, _store_file)
    return _store_file


def job_store(rank: int, world_size: int, address: str, port: int, limit: timedelta) -> Store:
    """Return the store of this attempt of the job; raise RuntimeError if nobody hosts it within the limit.

    It is the file of the launcher, or a TCP store that rank 0 or the agent of torchrun hosts.
    """
    path = store_file()
    if path is not None:
        return _store_in_file(path, rank, world_size, limit)
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # Not `wait_for_workers`: it waits for the other ranks without a word.
    if rank == 0 and not by_agent:
        store: Store = host_store(address, port, limit, world_size=world_size, wait_for_workers=False)
    else:
        _wait_for_host("the store of the launcher" if by_agent else "rank 0", address, port, limit)
        store = TCPStore(address, port, world_size, False, timeout=limit, wait_for_workers=False)
    # torchrun may pass the store of a failed attempt to the restarted workers.
    return fresh_store(store, rank, world_size, limit) if restarts_share_a_store() else store


def _store_in_file(path: str, rank: int, world_size: int, limit: timedelta) -> Store:
    if not os.path.isdir(os.path.dirname(path)):
        # Torch would wait for it without a word.
        raise RuntimeError(
            f"The ranks of this job cannot meet: their folder {os.path.dirname(path)} does not exist. The launcher made it in "
            "the folder for temporary files; another program has deleted it, or the launcher has ended. Start the job again, "
            f"or unset {STORE_VARIABLE} if this program is no worker of it."
        )
    store = FileStore(path, -1)
    # Says which ranks are missing. `fresh_store` does not.
    wait_for_ranks(store, rank, world_size, limit)
    # A worker that leaves its process group may join again, and the file still has the addresses of the first time.
    return fresh_store(store, rank, world_size, limit)


def _wait_for_host(who: str, address: str, port: int, limit: timedelta) -> None:
    waiting = _Waiting(limit)
    while True:
        try:
            return socket.create_connection((address, port), _CONNECT_SECONDS).close()
        except OSError as error:
            if waiting.is_over:
                raise RuntimeError(
                    f"{who} has not joined this job within {waiting.seconds:.0f} s: {address}:{port} cannot be reached "
                    f"({error}). See its output, and check MASTER_ADDR and MASTER_PORT. {_LONGER}"
                ) from error
        if waiting.is_due:
            waiting.report(f"{who} at {address}:{port}")
        time.sleep(_CONNECT_POLL_SECONDS)


def wait_for_ranks(store: Store, rank: int, world_size: int, limit: timedelta) -> None:
    """Wait until every rank has come to this store, and say which ranks are missing; raise RuntimeError at the limit."""
    keys = [f"{_ARRIVED}/{number}" for number in range(world_size)]
    store.set(keys[rank], "")
    store.add(_NUM_ARRIVED, 1)
    waiting, missing = _Waiting(limit), list[int]()
    try:
        # Each rank asks for the number only, until it is complete: many ranks would ask for many keys. `store.wait` prints
        # warnings of its own.
        while store.add(_NUM_ARRIVED, 0) < world_size or not store.check(keys):
            if waiting.is_due:
                missing = [number for number, key in enumerate(keys) if not store.check([key])]
            if missing and waiting.is_over:
                raise TimeoutError
            if missing and waiting.is_due:
                # One rank speaks for all.
                waiting.report(names(missing), is_told=rank == min(set(range(world_size)) - set(missing)))
            time.sleep(max(_POLL_SECONDS, world_size / _MOST_POLLS_PER_SECOND))
    except TimeoutError:
        raise RuntimeError(
            f"{names(missing)} of {world_size} {'has' if len(missing) == 1 else 'have'} not joined this job within "
            f"{waiting.seconds:.0f} s: not started, or ended before. See the output of the missing ranks. {_LONGER}"
        ) from None
    except RuntimeError as error:
        raise RuntimeError(
            f"the store of this job was lost after {waiting.seconds:.0f} s of waiting for "
            f"{names(missing) if missing else 'the other ranks'}: rank 0 or the launcher has ended. Its output shows the "
            f"cause. ({error})"
        ) from error


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
            "node, check that all nodes were started with the same rendezvous endpoint, and with the same "
            "FORGATHER_JOB_SECRET or none."
        )
