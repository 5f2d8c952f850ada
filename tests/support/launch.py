"""Start ranks as processes of their own: for tests that kill them, restart them, or go through torchrun."""

import atexit
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.rank_nursery import REPOSITORY
from tests.support.rank_pool import worker_variables
from tests.support.rank_protocol import rank_variables
from tests.support.ranks import RankTimeout

STACKS_SECONDS = 1.0
LOWEST_PORT, HIGHEST_PORT = 10000, 65535
# What torchrun and the rank harness set; a test process that has them must not pass them on.
INHERITED_VARIABLES = ("TORCHELASTIC_", "GROUP_", "ROLE_", *rank_variables(0, 1, 0))

_started: "list[CapturedProcess]" = []


class CapturedProcess:
    """A process whose output is kept, and which can be ended together with everything it started."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], cwd: Path | str | None, name: str) -> None:
        self.name = name
        # The child shares our offset in the file, so it is only ever read by position.
        self._output_file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the object
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._output_file,
            stderr=subprocess.STDOUT,
            cwd=REPOSITORY if cwd is None else cwd,
            env={**_clean_environment(), **env},
            start_new_session=True,
        )
        _started.append(self)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal, or None while the process runs."""
        return self._process.poll()

    @property
    def output(self) -> str:
        """Everything printed so far, stdout and stderr together."""
        descriptor = self._output_file.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")

    def wait(self, timeout: float) -> int:
        """The exit code; a process that takes longer is killed and shown with its stacks in a `RankTimeout`."""
        return finish_all([self], timeout)[0]

    def wait_for_output(self, text: str, timeout: float) -> None:
        """Return once the process has printed `text`; fail when it ends or takes too long."""
        deadline = time.monotonic() + timeout
        while text not in self.output:
            if self.returncode is not None or time.monotonic() > deadline:
                raise AssertionError(
                    f"{self.name} did not print {text!r} (exit code {self.returncode}):\n{self.output}"
                )
            time.sleep(0.02)

    def request_stacks(self) -> None:
        """Have this process and its descendants print their stacks; those without `rank_stacks.register` end instead."""
        for process in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        """SIGKILL this process and its descendants; it stays readable."""
        for process in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()

    def _family(self) -> list[psutil.Process]:
        """This process first, so that a parent cannot start new children while they are being ended."""
        if self._process.poll() is not None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.pid)
            return [parent, *parent.children(recursive=True)]
        return []


class RankProcess(CapturedProcess):
    """One rank."""

    def __init__(
        self, rank: int, command: Sequence[str], env: Mapping[str, str], cwd: Path | str | None = None
    ) -> None:
        super().__init__(command, env, cwd, name=f"rank {rank}")
        self.rank = rank


@dataclass
class CompletedAgent:
    """A torchrun agent that has ended, with the output of its ranks."""

    node_rank: int
    returncode: int
    output: str


class _Agent(CapturedProcess):
    """A torchrun agent; its stacks are of no interest, those of its ranks are."""

    def request_stacks(self) -> None:
        for process in self._family()[1:]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGUSR1)


def start_ranks(
    script_or_module_args: Sequence[str],
    world_size: int,
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
) -> list[RankProcess]:
    """Start `python <args>` once per rank, as one node, with the variables that torchrun would set.

    The arguments begin with a script's path or with `-m` and a module. Scripts that call `rank_stacks.register()` show
    their stacks when they hang.
    """
    port = free_port()
    command = [sys.executable, *script_or_module_args]
    return [
        RankProcess(rank, command, {**(env or {}), **rank_variables(rank, world_size, port)}, cwd)
        for rank in range(world_size)
    ]


def finish_all(processes: Sequence[CapturedProcess], timeout: float) -> list[int]:
    """The exit codes of all processes; when some take longer all are killed and `RankTimeout` shows what they did."""
    deadline = time.monotonic() + timeout
    while any(process.returncode is None for process in processes):
        if time.monotonic() > deadline:
            raise RankTimeout(_describe_hang(processes, timeout))
        time.sleep(0.02)
    return [process.returncode or 0 for process in processes]


def run_torchrun(
    script_args: Sequence[str],
    nproc_per_node: int,
    nnodes: int = 1,
    max_restarts: int = 0,
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
) -> list[CompletedAgent]:
    """Run a script under torchrun, with `nnodes` agents on this machine, each of which takes itself for a node."""
    port = free_port()
    agents = []
    for node_rank in range(nnodes):
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nnodes)),
            *("--nproc-per-node", str(nproc_per_node), "--max-restarts", str(max_restarts)),
            *rendezvous_options(node_rank, port, elastic=max_restarts > 0),
            *script_args,
        ]
        agents.append(_Agent(command, env or {}, None, name=f"node {node_rank}"))
    codes = finish_all(agents, timeout)
    return [
        CompletedAgent(rank, code, agent.output) for rank, (agent, code) in enumerate(zip(agents, codes, strict=True))
    ]


def kill_leftovers() -> None:
    """End every process started here that still runs."""
    while _started:
        _started.pop().kill()


atexit.register(kill_leftovers)


def free_port() -> int:
    """A port that a job can listen on a moment later.

    Never one of those that the system hands out by itself: any connection that begins in that moment could get it. Drawn
    from the system, since forks and tests that seed `random` would all draw the same.
    """
    draw = random.SystemRandom()
    while True:
        port = draw.randrange(LOWEST_PORT, first_ephemeral_port())
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def first_ephemeral_port() -> int:
    """Where the ports begin that the system gives to whoever asks for any."""
    setting = Path("/proc/sys/net/ipv4/ip_local_port_range")
    # Elsewhere than on Linux they begin higher than by default there.
    first = int(setting.read_text().split()[0]) if setting.exists() else 32768
    # Where nearly all ports are given away there is none that is safe.
    return first if first >= 2 * LOWEST_PORT else HIGHEST_PORT + 1


def rendezvous_options(node_rank: int, port: int, elastic: bool) -> list[str]:
    """The options by which the agents of a job on this machine find each other."""
    if not elastic:
        return ["--node-rank", str(node_rank), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    # Only the c10d rendezvous brings several nodes together again after a restart.
    host = f"is_host={int(node_rank == 0)}"
    return [
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", f"test{port}"),
        *("--rdzv-conf", host, "--local-addr", "127.0.0.1"),
    ]


def _clean_environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(INHERITED_VARIABLES)}
    # With src, so that processes run this tree, and not another one that is installed.
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "src")])
    if os.environ.get("REHEARSAL") == "1":
        # The rehearsal device is loaded by a module on this path.
        path = os.pathsep.join([path, os.environ.get("PYTHONPATH", "")])
    return {**inherited, **worker_variables(), "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def _describe_hang(processes: Sequence[CapturedProcess], timeout: float) -> str:
    stuck = [process for process in processes if process.returncode is None]
    for process in stuck:
        process.request_stacks()
    time.sleep(STACKS_SECONDS)
    for process in stuck:
        process.kill()
    sections = [f"{', '.join(process.name for process in stuck)} did not finish within {timeout} seconds"]
    for process in processes:
        state = "hangs" if process in stuck else f"ended with exit code {process.returncode}"
        sections.append(f"--- {process.name} {state} ---\n{process.output.rstrip()}")
    return "\n".join(sections)
