"""Rank workers and programs of tests, forked from one process that has imported torch: a fork costs little.

Started as `python -m tests.support.rank_nursery <control fd> <module>...`; it imports the modules, and lives until the
test process closes that socket or dies. It must stay without threads, because it forks.
"""

import atexit
import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).parents[2]
# Modules that most tests on ranks need. The nursery imports them once for all workers, if the test process has them.
SHARED_MODULES = (
    "pytest",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "forgather.ml.trainer.accelerate",
    "forgather.ml.trainer.ddp.ddp_trainer",
    "forgather.ml.trainer.fsdp2.fsdp2_trainer",
    "forgather.ml.trainer.hybrid",
    "forgather.ml.trainer.pipeline",
    "tests.support.train_job",
    "tests.support.pipeline_job",
)
# Standard input, stdout with stderr, and the connection of a worker.
NUM_DESCRIPTORS = 3
MAX_MESSAGE_BYTES = 4096


class WarmProgram(NamedTuple):
    """Program that the nursery runs: a module and its arguments."""

    module: str
    arguments: tuple[str, ...] = ()


class Nursery:
    """Test process's end of the control socket: requests workers and receives their exit codes."""

    def __init__(self, output_path: Path, env: Mapping[str, str]) -> None:
        self._output_path = output_path
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, output_path.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.rank_nursery", str(theirs.fileno()), *shared_modules()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                cwd=REPOSITORY,
                env=dict(env),
                # Signals of the terminal are for the test process only.
                start_new_session=True,
            )
        self._pids: list[int] = []
        # By process id. An ended process leaves, because the system gives its number to another process.
        self._running: dict[int, NurseryProcess] = {}

    def start(self, descriptors: Sequence[int], stacks_path: Path) -> "NurseryProcess":
        """Start a worker with these descriptors as stdin, output and connection; the caller may close its copies."""
        return self._start({"stacks": str(stacks_path)}, descriptors)

    def run(self, program: "WarmProgram", env: Mapping[str, str], cwd: Path | str, output: int) -> "NurseryProcess":
        """Run a module as `python -m` would, with its output in this descriptor."""
        request = {"module": program.module, "arguments": program.arguments, "env": dict(env), "cwd": str(cwd)}
        with open(os.devnull, "rb") as nothing:
            return self._start(request, [nothing.fileno(), output])

    def _start(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> "NurseryProcess":
        # In a file, because an environment may be larger than a message.
        path = self._output_path.with_name("request.json")
        path.write_text(json.dumps(request))
        socket.send_fds(self._control, [os.fsencode(path)], descriptors)
        while not self._pids:
            self.read(timeout=None)
        process = NurseryProcess(self, self._pids.pop())
        return self._running.setdefault(process.pid, process)

    def close(self) -> None:
        self._control.close()
        self._process.wait()

    def read(self, timeout: float | None) -> bool:
        """Read one message, which may end a process; return False if none arrived in time."""
        if not select.select([self._control], [], [], timeout)[0]:
            return False
        message = self._control.recv(MAX_MESSAGE_BYTES)
        if not message:
            code, output = self._process.wait(), self._output_path.read_text(errors="replace")
            raise RuntimeError(f"the nursery of the rank workers ended with exit code {code}:\n{output}")
        pid, exit_code, has_survivors = json.loads(message)
        if exit_code is None:
            self._pids.append(pid)
        else:
            self._running.pop(pid).end(exit_code, has_survivors)
        return True


def shared_modules() -> list[str]:
    """Return the shared modules that this process has imported."""
    return [name for name in SHARED_MODULES if name in sys.modules]


class NurseryProcess:
    """Worker with the part of the `subprocess.Popen` interface that its pool uses."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.pid = pid
        self._nursery = nursery
        self._exit_code: int | None = None
        self._has_survivors = True

    def end(self, exit_code: int, has_survivors: bool) -> None:
        """Note the exit code, and whether processes of the session still run."""
        self._exit_code, self._has_survivors = exit_code, has_survivors

    def poll(self) -> int | None:
        return self._await_end(0.0)

    def wait(self, timeout: float = 60.0) -> int:
        code = self._await_end(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"rank worker {self.pid}", timeout)
        return code

    def _await_end(self, timeout: float) -> int | None:
        """Return the exit code, negative for a signal, or None while the process runs."""
        deadline = time.monotonic() + timeout
        while self._exit_code is None and self._nursery.read(max(0.0, deadline - time.monotonic())):
            pass
        return self._exit_code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill_session(self) -> None:
        """Send SIGKILL to the worker and to all processes that it started."""
        self.poll()
        # The number of an ended worker may belong to another process by now, unless its session still has members.
        kills = (os.killpg, os.kill) if self._exit_code is None else (os.killpg,) if self._has_survivors else ()
        for kill in kills:
            # The worker may have exited, or may not lead a process group yet.
            with contextlib.suppress(ProcessLookupError):
                kill(self.pid, signal.SIGKILL)
        self.wait()


def serve(control: socket.socket, wake_up: int, write_end: int) -> None:
    """Fork a worker for each request and report each exit, until the test process is gone."""
    while True:
        ready, _, _ = select.select([control, wake_up], [], [])
        if wake_up in ready:
            os.read(wake_up, MAX_MESSAGE_BYTES)
            tell_of_ends(control)
        if control in ready:
            message, descriptors, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, NUM_DESCRIPTORS)
            if not message:
                return
            request = json.loads(Path(os.fsdecode(message)).read_text())
            pid = start_child(request, descriptors, (control.fileno(), wake_up, write_end))
            control.send(json.dumps([pid, None, True]).encode())


def tell_of_ends(control: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            control.send(json.dumps([pid, os.waitstatus_to_exitcode(status), is_group(pid)]).encode())


def is_group(number: int) -> bool:
    """Return whether a process group with this number has members."""
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    return True


def start_child(request: Mapping[str, Any], descriptors: Sequence[int], not_for_children: Sequence[int]) -> int:
    """Fork a worker or a program, and return its process id."""
    pid = os.fork()
    if pid:
        close_all(descriptors)
        return pid
    code = 1
    try:
        # A new session, so that processes started by a test in the worker can be killed together with it.
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        stdin, output, *connections = descriptors
        for source, target in ((stdin, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        close_all([stdin, output, *not_for_children])
        if "module" in request:
            code = run_program(request)
        else:
            run_worker(connections[0], request["stacks"])
            code = 0
    except BaseException:  # noqa: BLE001 - the exit code and the output tell
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_program(request: Mapping[str, Any]) -> int:
    """Run a module, as an interpreter would that has just started, and return the exit code."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = [request["module"], *request["arguments"]]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    code = 0
    try:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001 - the exit code and the output tell
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return code


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def run_worker(connection: int, stacks_path: str) -> None:
    from tests.support.rank_worker import main

    main(connection, stacks_path)


def main(control_descriptor: str, *modules: str) -> None:
    for name in ("tests.support.rank_worker", *modules):
        importlib.import_module(name)
    importlib.import_module("tests.support.warm_up").warm_up()
    wake_up, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with socket.socket(fileno=int(control_descriptor)) as control:
        serve(control, wake_up, write_end)


if __name__ == "__main__":
    main(*sys.argv[1:])
