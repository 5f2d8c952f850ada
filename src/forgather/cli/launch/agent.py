"""Starts the processes of a run through torch's elastic agent, hands signals on to them, and tells how they ended."""

import logging
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from forgather.cli.errors import UsageError, complain
from forgather.cli.launch.node_meeting import NodeMeeting, NumberedMeeting, RepeatedMeeting, wait_in_thread
from forgather.cli.launch.options import LAUNCHER_VARIABLE, LaunchOptions
from forgather.cli.launch.root_cause import RootCause, find_root_cause

INTERRUPTED = 130
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# Workers save and end by themselves after these; torch's agent would give them 30 seconds and call it a failure.
_SIGNALS_OF_AGENT = "SIGHUP,SIGQUIT"


def launch(options: LaunchOptions, words: Sequence[str]) -> int:
    """Run `forgather <words>` in the processes that the options ask for; returns the exit code of the job."""
    _prepare_environment(options)
    spec = _worker_spec(options, words)
    with tempfile.TemporaryDirectory(prefix="forgather-") as folder_of_errors:
        agent = _Agent(spec, DefaultLogsSpecs(log_dir=folder_of_errors))
        try:
            with agent.stop_signals_handed_on():
                result = agent.run()
        except SignalException as stop:
            complain(f"ended by {stop.sigval.name}; nothing was saved since the last checkpoint")
            return 128 + int(stop.sigval)
        finally:
            if agent.has_met:
                spec.rdzv_handler.shutdown()
    if not result.is_failed():
        return 0
    if agent.was_stopped_early(result):
        raise KeyboardInterrupt
    return _tell_failure(find_root_cause(result.failures))


class _Agent(LocalElasticAgent):
    """Torch's agent, which waits for workers that were asked to stop for as long as they take to save."""

    def __init__(self, spec: WorkerSpec, logs_specs: DefaultLogsSpecs) -> None:
        super().__init__(spec, logs_specs)
        self._received: list[signal.Signals] = []
        # None: there are no workers yet. Empty: they are being started, and cannot be reached for a moment.
        self._pids: list[int] | None = None

    @contextmanager
    def stop_signals_handed_on(self) -> Iterator[None]:
        """While active, requests to stop go to the workers, which save and end."""
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
        """Whether workers ended without saving because a request to stop came before they began to train."""
        by_request = {-int(number) for number in self._received} | {INTERRUPTED}
        return bool(self._received) and any(failure.exitcode in by_request for failure in result.failures.values())

    @property
    def has_met(self) -> bool:
        """Whether no rendezvous is under way; one that a signal has ended is left alone, since others still use it."""
        return self._pids is not None

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        if self._pids is None or self._received.count(signal.SIGINT) > 1:
            # Nobody to tell yet, or they were told twice and still do not end.
            raise KeyboardInterrupt
        self._received.append(signal.Signals(number))
        _send(number, self._pids)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        # Nobody to hand signals on to until there are new workers.
        self._pids = None
        if self._received:
            raise KeyboardInterrupt
        meeting = worker_group.spec.rdzv_handler
        if isinstance(meeting, NodeMeeting):
            wait_in_thread(lambda: super(_Agent, self)._rendezvous(worker_group), meeting)
        else:
            super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._pids = []
        workers: dict[int, Any] = super()._start_workers(worker_group)
        self._pids = list(workers.values())
        for number in self._received:
            _send(number, self._pids)
        return workers

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed() and self._received:
            # Who was asked to stop is not to begin again.
            self._remaining_restarts = 0
        if result.is_failed() and self._remaining_restarts > 0:
            cause = find_root_cause(result.failures)
            num_restarts = worker_group.spec.max_restarts
            number = num_restarts - self._remaining_restarts + 1
            _show(cause.traceback)
            complain(f"{cause.sentence()} Starting again, {number} of {num_restarts} times.")
        return result


def _send(number: int, pids: Sequence[int]) -> None:
    for pid in pids:
        # One that has ended already needs no signal.
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _prepare_environment(options: LaunchOptions) -> None:
    """Variables that the workers inherit."""
    os.environ[LAUNCHER_VARIABLE] = sys.argv[0]
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = _SIGNALS_OF_AGENT
    if "OMP_NUM_THREADS" not in os.environ:
        # Each process would otherwise use a thread per processor, and they would all be in each other's way.
        num_threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        os.environ["OMP_NUM_THREADS"] = str(max(num_threads // options.num_processes_per_node, 1))
    # What it would report is told in fewer words below.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _worker_spec(options: LaunchOptions, words: Sequence[str]) -> WorkerSpec:
    return WorkerSpec(
        role="forgather",
        local_world_size=options.num_processes_per_node,
        entrypoint=sys.executable,
        args=("-m", "forgather.cli.main", *words),
        rdzv_handler=_rendezvous(options),
        max_restarts=options.max_restarts,
        monitor_interval=0.1,
        local_addr="localhost" if options.num_nodes == 1 else None,
    )


def _rendezvous(options: LaunchOptions) -> RendezvousHandler:
    """Where the nodes meet; one alone meets itself on a free port."""
    if options.num_nodes == 1:
        # The address is said because torch would look for the name of this machine, which takes seconds where nobody
        # answers.
        return get_rendezvous_handler(
            RendezvousParameters("c10d", "localhost:0", str(uuid.uuid4()), 1, 1, local_addr="localhost", timeout=900)
        )
    assert options.rendezvous_endpoint is not None and options.node_rank is not None
    # Only torch's own brings nodes together again after a failure; only ours numbers them as they were told.
    meeting = RepeatedMeeting if options.max_restarts > 0 else NumberedMeeting
    return meeting(options.rendezvous_endpoint, options.num_nodes, options.node_rank)


def _tell_failure(cause: RootCause) -> int:
    """Show what went wrong, once; a mistake in the configuration is no failure of a rank."""
    if cause.usage_error is not None:
        raise UsageError(cause.usage_error)
    _show(cause.traceback)
    complain(cause.sentence())
    return 1


def _show(traceback: str) -> None:
    if traceback:
        print(traceback.rstrip(), file=sys.stderr, flush=True)
