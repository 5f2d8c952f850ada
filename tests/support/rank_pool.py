"""Worker processes that tests share, because starting a Python with torch takes seconds."""

import contextlib
import os
import signal
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

MAX_RANKS = 4
TEAR_DOWN_SECONDS = 10.0
STACKS_SECONDS = 3.0


class Worker:
    """One worker process: its connection, its output and its stacks."""

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
        """Send a message; a worker that has died is noticed when its answer is read."""
        with contextlib.suppress(OSError):
            self.connection.send(message)

    def is_silent_and_dead(self) -> bool:
        """Whether the process has ended without its connection showing it: children it forked may hold that open."""
        return self.process.poll() is not None and not self.connection.poll()

    def receive(self) -> Any:
        """The next message, or None when the worker has died."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            return None

    def output(self) -> str:
        """What the worker has printed since it started or since `forget_output`."""
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
        self.process.send_signal(signal.SIGUSR1)

    def stacks(self) -> str:
        """The stacks asked for by `request_stacks`."""
        deadline = time.monotonic() + STACKS_SECONDS
        text, previous = self._stacks_path.read_text(), ""
        while time.monotonic() < deadline and (not text or text != previous):
            time.sleep(0.05)
            text, previous = self._stacks_path.read_text(), text
        return text or "(no stacks: the process did not answer)"

    def kill(self) -> None:
        """End the process and those it started."""
        if self.connection.closed:
            return
        self.process.kill_session()
        os.close(self._stdin)
        self.connection.close()


def worker_variables() -> dict[str, str]:
    """Variables of every rank: one thread each, since ranks outnumber cores, and traffic that stays on this machine.

    Where nobody answers name look-ups, the rendezvous of some ranks would wait five seconds for one.
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
    """The workers that are idle between two calls."""

    idle: list[Worker] = field(default_factory=list)
    _directory: "tempfile.TemporaryDirectory[str] | None" = None
    _nursery: Nursery | None = None
    _num_started: int = 0

    def take(self, count: int) -> list[Worker]:
        """`count` live workers, started where too few are idle; they are given back or killed by the caller."""
        workers = [worker for worker in self.idle if worker.process.poll() is None]
        for dead in [worker for worker in self.idle if worker not in workers]:
            dead.kill()
        self.idle = workers[count:]
        return workers[:count] + [self._start() for _ in range(count - len(workers))]

    def give_back(self, workers: list[Worker]) -> None:
        """Let the workers tidy up; those that cannot are killed, and later calls get new ones."""
        for worker in workers:
            worker.send(TearDown())
        clean = self._await_clean(workers)
        # In front, in rank order: the workers that were used last have the tests' modules imported.
        self.idle = [worker for worker in workers if worker in clean] + self.idle
        for worker in clean:
            worker.forget_output()
        for worker in workers:
            if worker not in clean:
                worker.kill()

    def close(self) -> None:
        """End all idle workers."""
        for worker in self.idle:
            worker.kill()
        self.idle = []
        if self._nursery is not None:
            self._nursery.close()
            self._nursery = None
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def _start(self) -> Worker:
        if self._directory is None:
            self._directory = tempfile.TemporaryDirectory(prefix="rank_workers_")
        directory = Path(self._directory.name)
        if self._nursery is None:
            self._nursery = Nursery(directory / "nursery.output", {**os.environ, **worker_variables()})
        self._num_started += 1
        return Worker(self._nursery, directory, self._num_started)

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
