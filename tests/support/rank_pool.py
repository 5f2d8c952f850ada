"""Pool of rank workers that tests share, because starting Python with torch takes seconds."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.support.rank_nursery import Nursery
from tests.support.rank_protocol import Clean, TearDown
from tests.support.rank_stacks import STACKS_SIGNAL

MAX_RANKS = 4
TEAR_DOWN_SECONDS = 10.0
STACKS_SECONDS = 3.0


class Worker:
    """Worker process with its connection, its output and its stacks."""

    def __init__(self, nursery: Nursery, directory: Path, number: int) -> None:
        self._output_path = directory / f"worker{number}.output"
        self._stacks_path = directory / f"worker{number}.stacks"
        self._output_start = 0
        ours, theirs = socket.socketpair()
        stdin, self._stdin = os.pipe()
        with theirs, self._output_path.open("wb") as output:
            self.process = nursery.start([stdin, output.fileno(), theirs.fileno()], self._stacks_path)
        os.close(stdin)
        self.connection = Connection(ours.detach())

    def send(self, message: Any) -> None:
        """Send a message; a dead worker is noticed when its answer is read."""
        with contextlib.suppress(OSError):
            self.connection.send(message)

    def is_silent_and_dead(self) -> bool:
        """Return whether the process is dead but its connection is open, because forked children hold it."""
        return self.process.poll() is not None and not self.connection.poll()

    def receive(self) -> Any:
        """Return the next message, or None if the worker has died."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            return None

    def output(self) -> str:
        """Return the output since the start or since the last `forget_output`."""
        return self._output_path.read_bytes()[self._output_start :].decode(errors="replace")

    def forget_output(self) -> None:
        self._output_start = self._output_path.stat().st_size

    def exit_code(self) -> int | None:
        try:
            return self.process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            return None

    def request_stacks(self) -> None:
        self._stacks_path.write_text("")
        self.process.send_signal(STACKS_SIGNAL)

    def stacks(self) -> str:
        """Return the stacks requested with `request_stacks`."""
        deadline = time.monotonic() + STACKS_SECONDS
        text, previous = self._stacks_path.read_text(), ""
        while time.monotonic() < deadline and (not text or text != previous):
            time.sleep(0.05)
            text, previous = self._stacks_path.read_text(), text
        return text or "(no stacks: the process did not answer)"

    def kill(self) -> None:
        """Kill the process and all processes that it started."""
        if self.connection.closed:
            return
        self.process.kill_session()
        os.close(self._stdin)
        self.connection.close()


def worker_variables() -> dict[str, str]:
    """Return the environment of every rank: one thread, because ranks outnumber cores, and loopback traffic only.

    `RES_OPTIONS` limits DNS look-ups: without a reachable name server, the rendezvous would wait five seconds for each.
    """
    interface = "lo" if sys.platform == "linux" else "lo0"
    return {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": interface,
        "TOKENIZERS_PARALLELISM": "false",
        "RES_OPTIONS": "timeout:1 attempts:1",
    }


@dataclass
class WorkerPool:
    """Pool of the workers that are idle between two calls."""

    idle: list[Worker] = field(default_factory=list)
    _directory: "tempfile.TemporaryDirectory[str] | None" = None
    _nursery: Nursery | None = None
    _num_started: int = 0

    def take(self, count: int) -> list[Worker]:
        """Return `count` live workers, starting new ones if too few are idle; the caller returns or kills them."""
        workers = [worker for worker in self.idle if worker.process.poll() is None]
        for dead in [worker for worker in self.idle if worker not in workers]:
            dead.kill()
        self.idle = workers[count:]
        return workers[:count] + [self._start() for _ in range(count - len(workers))]

    def give_back(self, workers: list[Worker]) -> None:
        """Tear the workers down; kill workers that fail, so that later calls get new ones."""
        for worker in workers:
            worker.send(TearDown())
        clean = self._await_clean(workers)
        # In front and in rank order: the workers used last have already imported the modules of the tests.
        self.idle = [worker for worker in workers if worker in clean] + self.idle
        for worker in clean:
            worker.forget_output()
        for worker in workers:
            if worker not in clean:
                worker.kill()

    def close(self) -> None:
        """Kill all idle workers and the nursery."""
        for worker in self.idle:
            worker.kill()
        self.idle = []
        if self._nursery is not None:
            self._nursery.close()
            self._nursery = None
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def nursery(self) -> Nursery:
        """Return the process that forks workers and programs; start it at the first call."""
        if self._nursery is None:
            self._nursery = Nursery(self._folder() / "nursery.output", {**os.environ, **worker_variables()})
        return self._nursery

    def _start(self) -> Worker:
        nursery = self.nursery()
        self._num_started += 1
        return Worker(nursery, self._folder(), self._num_started)

    def _folder(self) -> Path:
        if self._directory is None:
            self._directory = tempfile.TemporaryDirectory(prefix="rank_workers_")
        return Path(self._directory.name)

    def _await_clean(self, workers: list[Worker]) -> list[Worker]:
        clean: list[Worker] = []
        waiting = {worker.connection: worker for worker in workers}
        deadline = time.monotonic() + TEAR_DOWN_SECONDS
        while waiting and time.monotonic() < deadline:
            for connection in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
                assert isinstance(connection, Connection)
                worker = waiting.pop(connection)
                answer = worker.receive()
                if isinstance(answer, Clean) and not answer.leftovers:
                    clean.append(worker)
        return clean
