"""Elastic agent of `forgather train --nnodes MIN:MAX`: restarts the workers when nodes are lost, leave or join.

A change of nodes does not count as one of --max-restarts; a failure of the program does. Before a new node joins, the
running workers save a checkpoint, so that no step is repeated. `launch` creates it.
"""

import signal
import time
from contextlib import suppress

from torch.distributed import DistError, DistStoreError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError

from forgather.cli.errors import complain
from forgather.cli.launch.agent import Agent, NoRestartsLeft, send
from forgather.cli.launch.elastic_meeting import ElasticMeeting
from forgather.cli.launch.root_cause import is_consequence
from forgather.cli.launch.run_notes import was_preempted

_SAVE_SECONDS = 1800
"""Longest wait for workers that save before a new node joins."""
_POLL_SECONDS = 0.1


class ElasticAgent(Agent):
    """Agent of one node in a job with a variable number of nodes."""

    _members: frozenset[str] = frozenset()
    _failures: dict[int, ProcessFailure] | None = None
    """Failures that may be the consequence of a lost node, until the next rendezvous shows it."""
    _is_borrowed = False
    """Whether the restart after these failures exceeds --max-restarts."""
    _has_lost_nodes = False

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        # Not the agent's own monitor: it would announce a restart that may not count.
        result: RunResult = LocalElasticAgent._monitor_workers(self, worker_group)
        while result.state == WorkerState.HEALTHY and self._received:
            # The agent would ask the store for new nodes, and its host may have left first.
            time.sleep(_POLL_SECONDS)
            result = LocalElasticAgent._monitor_workers(self, worker_group)
        if result.state == WorkerState.HEALTHY and not self._received:
            return self._checked_nodes(result)
        if result.state == WorkerState.SUCCEEDED and not self._received and was_preempted():
            # The signal came from the agent of another node, which saw a node join, or leaves.
            return self._restarted("the job saves and restarts, because a node joins or leaves")
        if not result.is_failed():
            return result
        if all(map(is_consequence, result.failures.values())) and not self._received:
            return self._wait_for_cause(result)
        return self._announced(worker_group, result)

    def _checked_nodes(self, result: RunResult) -> RunResult:
        """Restart healthy workers if a node of the job has no heartbeat: they may wait for it forever."""
        # The workers of a node that leaves have saved together with ours, which are about to exit.
        lost = [node for node in self._members - self._meeting.members if not self._meeting.has_left(node)]
        if not lost:
            return result
        self._has_lost_nodes = True
        return self._restarted(f"{_nodes(len(lost))} without a heartbeat for 15 s: restarting on the others")

    def _wait_for_cause(self, result: RunResult) -> RunResult:
        """Restart workers that only lost contact; the rendezvous shows whether a node was lost."""
        self._failures, self._is_borrowed = result.failures, self._remaining_restarts == 0
        # The agent decrements it. With none left, it would end the job without looking for the cause.
        self._remaining_restarts = max(self._remaining_restarts, 1)
        complain("contact with the ranks of another node was lost: meeting the nodes that are left")
        return result

    def _restarted(self, message: str) -> RunResult:
        complain(message)
        self._remaining_restarts += 1
        return RunResult(state=WorkerState.UNHEALTHY)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._meet(worker_group)
        before, self._members = self._members, self._meeting.members
        failures, self._failures = self._failures, None
        if before and before != self._members:
            complain(f"the job continues on {_nodes(len(self._members))} (before: {len(before)})")
        if failures is None:
            return
        if before != self._members:
            # A lost node is no failure of the program.
            self._remaining_restarts += 0 if self._is_borrowed else 1
        elif self._is_borrowed:
            raise NoRestartsLeft(failures)

    def _meet(self, worker_group: WorkerGroup) -> None:
        """Meet the other nodes; repeated if a node was lost after it joined and before the ranks were assigned."""
        while True:
            try:
                return super()._rendezvous(worker_group)
            except DistStoreError:
                complain("a node was lost during the rendezvous: meeting again")

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        if worker_group.state == WorkerState.HEALTHY:
            complain("a node joins: saving a checkpoint before the restart")
            self._save_first()
        elif self._has_lost_nodes:
            # They wait for a lost node and cannot save.
            send(signal.SIGKILL, self._pids or ())
        self._has_lost_nodes = False
        super()._stop_workers(worker_group)

    def _save_first(self) -> None:
        """Ask the workers to save and exit, and wait for them. If they fail instead, the restart is the same."""
        assert self._pcontext is not None
        send(signal.SIGTERM, self._pids or ())
        deadline = time.monotonic() + _SAVE_SECONDS
        while self._pcontext.wait(0) is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _exit_barrier(self) -> None:
        # The other nodes continue without a node that was asked to stop, so there is nothing to wait for.
        if not self.leaves:
            super()._exit_barrier()  # type: ignore[no-untyped-call]

    def part(self) -> None:
        if not self.leaves:
            super().part()
        elif self.has_met:
            # The host of the store may have left first.
            with suppress(RendezvousError, DistError):
                self._meeting.leave()

    @property
    def leaves(self) -> bool:
        """Whether this node was asked to stop. The rendezvous then stays open for the other nodes."""
        return bool(self._received)

    @property
    def _meeting(self) -> ElasticMeeting:
        meeting = self._worker_group.spec.rdzv_handler
        assert isinstance(meeting, ElasticMeeting)
        return meeting


def _nodes(number: int) -> str:
    return f"{number} node{'s' if number != 1 else ''}"
