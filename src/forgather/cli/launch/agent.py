"""Elastic agent of `forgather train --nproc`: starts the workers, forwards stop signals, and reports failures.

After a stop signal the workers save a checkpoint and exit, and the agent waits for as long as that takes.
"""

import logging
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from torch.distributed import DistNetworkError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousConnectionError, RendezvousHandler

from forgather.cli.errors import UsageError, complain
from forgather.cli.launch import run_notes
from forgather.cli.launch.death_notes import note_deaths
from forgather.cli.launch.elastic_meeting import ElasticMeeting
from forgather.cli.launch.lifeline import tie_workers
from forgather.cli.launch.node_meeting import (
    LocalMeeting,
    NodeMeeting,
    NumberedMeeting,
    RepeatedMeeting,
    wait_in_thread,
)
from forgather.cli.launch.options import ELASTIC_VARIABLE, LAUNCHER_VARIABLE, LaunchOptions
from forgather.cli.launch.root_cause import REPEATED_FAILURE, RootCause, find_root_cause
from forgather.cli.output import note
from forgather.ml.distributed.rendezvous import STORE_VARIABLE

INTERRUPTED = 130
"""Exit code after the same failure has ended several attempts; a scheduler should not start the job again."""
_LOST_STORE = (
    "The connection to the rendezvous at {endpoint} was lost: the node that hosts it has failed, ended or fallen silent, and "
    "the job cannot continue without it. Start the job again on all nodes; it resumes from the newest checkpoint. An "
    "endpoint on a machine outside of the job survives the loss of any node."
)
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# Signals that torch's agent handles itself. It must not handle the stop signals: it would kill the workers after 30
# seconds and report a failure, while they are still saving.
_SIGNALS_OF_AGENT = "SIGHUP,SIGQUIT"


def launch(options: LaunchOptions, words: Sequence[str]) -> int:
    """Run `forgather <words>` in the requested processes; returns the exit code of the job."""
    _prepare_environment(options)
    # The folder receives one error file per worker, written by torchelastic. On a single node the ranks meet in it.
    with tempfile.TemporaryDirectory(prefix="forgather-") as folder:
        spec = _worker_spec(options, words, folder)
        agent = _make_agent(options, spec, folder)
        try:
            with agent.stop_signals_handed_on():
                result = agent.run()
        except (RendezvousConnectionError, DistNetworkError) as lost:
            raise ConnectionError(_LOST_STORE.format(endpoint=options.rendezvous_endpoint)) from lost
        except RendezvousClosedError:
            return _end_with_others(agent)
        except NoRestartsLeft as failed:
            return _tell_failure(find_root_cause(failed.failures))
        except SignalException as stop:
            complain(f"stopped by {stop.sigval.name}; nothing was saved since the last checkpoint")
            return 128 + int(stop.sigval)
        finally:
            agent.part()
    if not result.is_failed():
        return 0
    if agent.was_stopped_early(result):
        raise KeyboardInterrupt
    return _tell_failure(find_root_cause(result.failures))


def _end_with_others(agent: "Agent") -> int:
    """Return the exit code of a node that finds the rendezvous closed; a node that never trained is a spare."""
    complain("the job has ended on the other nodes; see their output")
    return 1 if agent.has_trained else 0


class NoRestartsLeft(Exception):
    """The same nodes met again after a failure, and --max-restarts is used up."""

    def __init__(self, failures: Mapping[int, ProcessFailure]) -> None:
        super().__init__()
        self.failures = failures


def _make_agent(options: LaunchOptions, spec: WorkerSpec, folder: str) -> "Agent":
    run_notes.use_folder(folder)
    logs = DefaultLogsSpecs(log_dir=folder)
    if not options.is_elastic:
        return Agent(spec, logs)
    # Imported here, because it extends the agent of this module.
    from forgather.cli.launch.elastic_agent import ElasticAgent

    return ElasticAgent(spec, logs)


class Agent(LocalElasticAgent):
    """Elastic agent that waits for stopped workers until they have saved."""

    def __init__(self, spec: WorkerSpec, logs_specs: DefaultLogsSpecs) -> None:
        super().__init__(spec, logs_specs)
        self._received: list[signal.Signals] = []
        # None: there are no workers yet. Empty: workers are starting, and their process ids are not known yet.
        self._pids: list[int] | None = None
        self.has_trained = False
        """Whether this node has started workers."""

    @contextmanager
    def stop_signals_handed_on(self) -> Iterator[None]:
        """Forward stop signals to the workers while the context is active."""
        # Python installs signal handlers in the main thread only.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._hand_on) for number in _STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def was_stopped_early(self, result: RunResult) -> bool:
        """Return whether workers exited without saving because a stop signal came before training began."""
        by_request = {code for number in self._received for code in (-int(number), 128 + int(number))} | {INTERRUPTED}
        return bool(self._received) and any(failure.exitcode in by_request for failure in result.failures.values())

    def part(self) -> None:
        """Close the rendezvous, which ends the job on all nodes."""
        if self.has_met:
            self._worker_group.spec.rdzv_handler.shutdown()

    @property
    def has_met(self) -> bool:
        """Whether a rendezvous was completed; shutting down one in progress would break it for other nodes."""
        return self._pids is not None

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        if self._pids is None or self._received.count(signal.SIGINT) > 1:
            # No workers exist yet, or two interrupts did not stop them.
            raise KeyboardInterrupt
        self._received.append(signal.Signals(number))
        send(number, self._pids)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        # There are no workers to forward signals to until new ones start.
        self._pids = None
        if self._received:
            raise KeyboardInterrupt
        meeting = worker_group.spec.rdzv_handler
        # A rendezvous of nodes may take minutes; the main thread must stay free to handle signals.
        if isinstance(meeting, NodeMeeting):
            wait_in_thread(lambda: super(Agent, self)._rendezvous(worker_group), meeting)
        else:
            super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._pids, self.has_trained = [], True
        workers: dict[int, Any] = super()._start_workers(worker_group)
        self._pids = list(workers.values())
        # Signals that arrived while the workers were starting.
        for number in self._received:
            send(number, self._pids)
        return workers

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        return self._announced(worker_group, result)

    def _announced(self, worker_group: WorkerGroup, result: RunResult) -> RunResult:
        """Return the result, after a message if failed workers will be restarted."""
        if not result.is_failed():
            return result
        if not self._received:
            note_deaths(worker_group, result)
        cause = find_root_cause(result.failures)
        is_final = cause.exit_code == REPEATED_FAILURE or cause.usage_error is not None or cause.is_aborted
        if self._received or is_final:
            # A job that was asked to stop, or that would fail again, must not be restarted.
            self._remaining_restarts = 0
        if result.is_failed() and self._remaining_restarts > 0:
            num_restarts = worker_group.spec.max_restarts
            number = num_restarts - self._remaining_restarts + 1
            _show(cause.traceback)
            complain(f"{cause.sentence()} Restarting ({number} of {num_restarts}).")
        return result


def send(number: int, pids: Sequence[int]) -> None:
    """Send a signal to the workers that have not ended."""
    for pid in pids:
        # The system may have given the id of an ended worker to a process of another job.
        with suppress(ProcessLookupError):
            if _is_child(pid):
                os.kill(pid, number)


def _is_child(pid: int) -> bool:
    """Return whether a process is a child of this one. A child keeps its id until its exit code is read."""
    if not hasattr(os, "waitid"):
        return True
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _prepare_environment(options: LaunchOptions) -> None:
    """Set the environment variables that the workers inherit, and silence torch's elastic loggers."""
    os.environ[LAUNCHER_VARIABLE] = sys.argv[0]
    tie_workers()
    if options.is_elastic:
        os.environ[ELASTIC_VARIABLE] = f"{options.min_nodes}:{options.num_nodes}"
    os.environ.pop(STORE_VARIABLE, None)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = _SIGNALS_OF_AGENT
    if "OMP_NUM_THREADS" not in os.environ:
        # By default each process uses one thread per core, so that the processes would compete for the cores.
        num_threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        os.environ["OMP_NUM_THREADS"] = str(max(num_threads // options.num_processes_per_node, 1))
    if options.num_nodes == 1 and (loopback := _loopback_interface()):
        # Gloo and NCCL would listen on an address that other machines can reach.
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, loopback)
    # The launcher prints a shorter report itself.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _loopback_interface() -> str | None:
    names = [name for _, name in socket.if_nameindex()] if hasattr(socket, "if_nameindex") else []
    return next((name for name in names if name in ("lo", "lo0")), None)


def _worker_spec(options: LaunchOptions, words: Sequence[str], folder: str) -> WorkerSpec:
    return WorkerSpec(
        role="forgather",
        local_world_size=options.num_processes_per_node,
        entrypoint=sys.executable,
        # -P: otherwise Python searches the current directory first, for every module that a worker imports.
        args=("-P", "-m", "forgather.cli.main", *words),
        rdzv_handler=_rendezvous(options, folder),
        max_restarts=options.max_restarts,
        monitor_interval=0.1,
        local_addr="localhost" if options.num_nodes == 1 else None,
    )


def _rendezvous(options: LaunchOptions, folder: str) -> RendezvousHandler:
    """Return the rendezvous handler; on a single node it uses the folder, and no network."""
    if options.num_nodes == 1 and not options.is_elastic:
        return LocalMeeting(folder)
    endpoint = options.rendezvous_endpoint
    assert endpoint is not None
    try:
        if options.is_elastic:
            assert options.min_nodes is not None
            nodes = (options.min_nodes, options.num_nodes, options.node_rank)
            return ElasticMeeting(endpoint, *nodes, options.node_wait, options.node_timeout)
        assert options.node_rank is not None
        # Only torch's rendezvous can be repeated after a failure; only Forgather's respects --node-rank.
        meeting = RepeatedMeeting if options.max_restarts > 0 else NumberedMeeting
        return meeting(endpoint, options.num_nodes, options.node_rank)
    except ValueError as error:
        # The job secret.
        raise UsageError(str(error)) from None


def _tell_failure(cause: RootCause) -> int:
    """Print the failure once and return the exit code; raise UsageError for a mistake in the configuration."""
    if cause.usage_error is not None:
        raise UsageError(cause.usage_error)
    _show(cause.traceback)
    complain(cause.sentence())
    return cause.exit_code


def _show(traceback: str) -> None:
    if traceback:
        note(traceback.rstrip())
