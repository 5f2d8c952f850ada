"""Job: the ranks of a run, and work that they coordinate; a single process is a job without a process group.

Every method is collective: all ranks must call it in the same order. An error on one rank is raised on all of them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from forgather.cli.errors import UsageError
from forgather.cli.launch.options import is_worker
from forgather.ml.distributed import (
    DistributedEnvironment,
    DistributedError,
    Peers,
    agreement,
)
from forgather.ml.distributed.shutdown import leave_process_group

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """Position of this process among the ranks of the run."""

    environment: DistributedEnvironment | None = None

    @classmethod
    @contextmanager
    def joined(cls, use_cpu: bool) -> "Iterator[Job]":
        """Join the job of this process; leave it after a body that succeeds.

        After an exception the process group is not left: leaving would wait for ranks that may never arrive.
        """
        if not is_worker():
            yield cls()
            return
        yield cls(DistributedEnvironment(no_accelerator=use_cpu, log_level="WARNING"))
        leave_process_group()

    @property
    def is_main(self) -> bool:
        """Whether this rank prints to the user."""
        return self.environment is None or self.environment.rank == 0

    def one_per_node_first(self, work: Callable[[], T], during: str) -> T:
        """Run `work` on one rank of each node, then on the others, which find its result on disk.

        If it fails on any rank, all ranks raise the same error. `work` must not communicate with other ranks.
        """
        if self.environment is None:
            return work()
        is_first = self.environment.local_rank == 0
        results: list[T] = []
        for has_turn in (is_first, not is_first):
            # Every rank enters both turns, because `agreement` is a collective.
            with _together(during):
                results += [work()] if has_turn else []
        return results[0]

    def one_per_node(self, work: Callable[[], None], during: str) -> None:
        """Run `work` on one rank of each node; the other ranks wait, and fail if it fails."""
        if self.environment is None:
            return work()
        with _together(during):
            if self.environment.local_rank == 0:
                work()
        return None

    def as_main_says(self, ask: Callable[[], T], during: str) -> T:
        """Run `ask` on rank 0 and broadcast its result: disks of other nodes may differ."""
        if self.environment is None:
            return ask()
        answer: T | None = None
        with _together(during):
            if self.is_main:
                answer = ask()
        # Reached only if rank 0 has succeeded: `agreement` raises on all ranks otherwise.
        found: T = Peers.world().broadcast(answer)  # type: ignore[assignment]
        return found


@contextmanager
def _together(during: str) -> Iterator[None]:
    """Agree on errors across ranks; a UsageError of one rank stays a UsageError on all ranks."""
    try:
        with agreement(during):
            yield
    except DistributedError as error:
        # The exception itself is not sent between ranks, only the name of its class and its message.
        if error.error_type == UsageError.__name__:
            raise UsageError(error.message) from None
        raise
