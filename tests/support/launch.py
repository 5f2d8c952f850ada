"""Ranks as separate processes, for tests that kill them, restart them, or run torchrun."""

import atexit
import contextlib
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.rank_nursery import REPOSITORY, NurseryProcess, WarmProgram
from tests.support.rank_pool import worker_variables
from tests.support.rank_protocol import rank_variables
from tests.support.rank_stacks import STACKS_SIGNAL
from tests.support.ranks import RankTimeout, nursery

STACKS_SECONDS = 1.0
LOWEST_PORT, HIGHEST_PORT = 10000, 65535
# Variables that torchrun and the rank harness set. A test process must not pass them on.
INHERITED_VARIABLES = ("TORCHELASTIC_", "GROUP_", "ROLE_", *rank_variables(0, 1, 0))

_started: "list[CapturedProcess]" = []


class CapturedProcess:
    """Process with captured output that can be killed together with all its descendants.

    A `WarmProgram` is forked from the nursery of the rank workers, which saves the imports.
    """

    def __init__(
        self, command: Sequence[str] | WarmProgram, env: Mapping[str, str], cwd: Path | str | None, name: str
    ) -> None:
        self.name = name
        # The child shares the file offset, so read only with `pread`.
        self._output_file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the object
        self._process = self._start(command, {**_clean_environment(), **env}, REPOSITORY if cwd is None else cwd)
        _started.append(self)

    def _start(
        self, command: Sequence[str] | WarmProgram, env: Mapping[str, str], cwd: Path | str
    ) -> "subprocess.Popen[bytes] | NurseryProcess":
        if isinstance(command, WarmProgram):
            return nursery().run(command, env, cwd, self._output_file.fileno())
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._output_file,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=env,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal, or None while the process runs."""
        return self._process.poll()

    @property
    def output(self) -> str:
        """Output so far, stdout and stderr together."""
        descriptor = self._output_file.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")

    def wait(self, timeout: float) -> int:
        """Return the exit code; after the timeout, kill the process and raise `RankTimeout` with its stacks."""
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
        """Make this process and its descendants print their stacks; without `rank_stacks.register` they die instead."""
        for process in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(STACKS_SIGNAL)

    def kill(self) -> None:
        """Send SIGKILL to this process and its descendants; the output stays readable."""
        for process in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()

    def _family(self) -> list[psutil.Process]:
        """Return this process and its descendants; the parent is first, so that it cannot start more."""
        if self._process.poll() is not None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.pid)
            return [parent, *parent.children(recursive=True)]
        return []


class RankProcess(CapturedProcess):
    """Process of one rank."""

    def __init__(
        self,
        rank: int,
        command: Sequence[str] | WarmProgram,
        env: Mapping[str, str],
        cwd: Path | str | None = None,
    ) -> None:
        super().__init__(command, env, cwd, name=f"rank {rank}")
        self.rank = rank


@dataclass
class CompletedAgent:
    """Finished torchrun agent with the output of its ranks."""

    node_rank: int
    returncode: int
    output: str


class _Agent(CapturedProcess):
    """Process of a torchrun agent; only its ranks print their stacks."""

    def request_stacks(self) -> None:
        for process in self._family()[1:]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(STACKS_SIGNAL)


def start_ranks(
    script_or_module_args: Sequence[str],
    world_size: int,
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
) -> list[RankProcess]:
    """Start `python <args>` once per rank on one node, with the variables that torchrun would set.

    The arguments start with the path of a script, or with `-m` and a module. Scripts that call `rank_stacks.register()`
    show their stacks when they hang.
    """
    port = free_port()
    command = [sys.executable, *script_or_module_args]
    return [
        RankProcess(rank, command, {**(env or {}), **rank_variables(rank, world_size, port)}, cwd)
        for rank in range(world_size)
    ]


def finish_all(processes: Sequence[CapturedProcess], timeout: float) -> list[int]:
    """Return all exit codes; after the timeout, kill the processes and raise `RankTimeout` with output and stacks."""
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
    """Run a script under torchrun with `nnodes` agents on this machine, each as its own node."""
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
    """Kill every process started here that still runs."""
    while _started:
        _started.pop().kill()


atexit.register(kill_leftovers)


def free_port() -> int:
    """Return a port that a job can listen on a moment later.

    The port is below the ephemeral range, because any new connection could take an ephemeral port in between. The draw
    comes from the system, because forks and tests that seed `random` would all draw the same port.
    """
    draw = random.SystemRandom()
    while True:
        port = draw.randrange(LOWEST_PORT, first_ephemeral_port())
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def first_ephemeral_port() -> int:
    """Return the first port of the ephemeral range, or a value above all ports if nearly all ports are ephemeral."""
    setting = Path("/proc/sys/net/ipv4/ip_local_port_range")
    # Other systems than Linux start their range above Linux's default.
    first = int(setting.read_text().split()[0]) if setting.exists() else 32768
    # If nearly all ports are ephemeral, no port is safe.
    return first if first >= 2 * LOWEST_PORT else HIGHEST_PORT + 1


def rendezvous_options(node_rank: int, port: int, elastic: bool) -> list[str]:
    """Return the rendezvous options for the agents of a job on this machine."""
    if not elastic:
        return ["--node-rank", str(node_rank), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    # Only the c10d rendezvous can bring several nodes together again after a restart.
    host = f"is_host={int(node_rank == 0)}"
    return [
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", f"test{port}"),
        *("--rdzv-conf", host, "--local-addr", "127.0.0.1"),
    ]


def _clean_environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(INHERITED_VARIABLES)}
    # Put src first, so that processes import this tree and not an installed package.
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
