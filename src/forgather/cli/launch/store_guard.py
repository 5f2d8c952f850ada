"""Guard of the rendezvous store: ends waits for a host that has fallen silent, such as after a power cut.

A host that dies closes its connections, and every call fails at once. A host that loses power or its network closes
nothing, and a call waits in C++ without a time limit. `StoreGuard` asks the store every second. After 20 seconds
without an answer it shuts down this process's connections to the store, so that all calls fail as for a dead host.
"""

import os
import socket
import threading
from contextlib import suppress

from torch.distributed import DistError, TCPStore

SILENCE_SECONDS = 20
_PERIOD_SECONDS = 1.0


class StoreGuard:
    """Watches over the connections of this process to the store at `host`:`port`."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._num_answers = 0
        self._stop = threading.Event()
        for work in (self._ask, self._watch):
            # Daemon threads: the first one may be blocked for ever.
            threading.Thread(target=work, name="store-guard", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def _ask(self) -> None:
        # A dead host ends this thread: the callers of the store get the same error.
        with suppress(DistError):
            store = TCPStore(*self._address, is_master=False, wait_for_workers=False)
            while not self._stop.wait(_PERIOD_SECONDS):
                store.check(["guard"])
                self._num_answers += 1

    def _watch(self) -> None:
        # Periods are counted, not time: a suspended launcher must not blame the host.
        num_seen, num_silent = 0, 0
        while num_silent * _PERIOD_SECONDS < SILENCE_SECONDS:
            if self._stop.wait(_PERIOD_SECONDS):
                return
            num_silent = num_silent + 1 if self._num_answers == num_seen else 0
            num_seen = self._num_answers
        shut_down_connections(self._address[1])


def shut_down_connections(port: int) -> None:
    """Shut down all connections of this process to a remote port; blocked reads then fail at once."""
    # torch keeps its sockets private, so they are found among the open files.
    for name in os.listdir("/dev/fd"):
        # The descriptor is no socket, not connected, or was closed meanwhile.
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if connection.getpeername()[1:2] == (port,):
                connection.shutdown(socket.SHUT_RDWR)
