"""The job: the ranks of a run and what they do together; one process alone is a job without a process group."""

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
    """This process's place among those of the run."""

    environment: DistributedEnvironment | None = None

    @classmethod
    @contextmanager
    def joined(cls, use_cpu: bool) -> "Iterator[Job]":
        """The job of this process, which it joins; left again after a body that succeeds.

        After a failure the process only ends: leaving would wait for ranks that may never come.
        """
        if not is_worker():
            yield cls()
            return
        yield cls(DistributedEnvironment(no_accelerator=use_cpu, log_level="WARNING"))
        leave_process_group()

    @property
    def is_main(self) -> bool:
        """Whether this is the process that speaks to people."""
        return self.environment is None or self.environment.rank == 0

    def one_per_node_first(self, work: Callable[[], T], during: str) -> T:
        """Do work whose result others find on disk on one process of each node, then on the others.

        When it fails anywhere all ranks raise the same error. It must not talk to other ranks.
        """
        if self.environment is None:
            return work()
        is_first = self.environment.local_rank == 0
        results: list[T] = []
        for has_turn in (is_first, not is_first):
            with _together(during):
                results += [work()] if has_turn else []
        return results[0]

    def one_per_node(self, work: Callable[[], None], during: str) -> None:
        """Do work on one process of each node; the others wait for it, and fail with it."""
        if self.environment is None:
            return work()
        with _together(during):
            if self.environment.local_rank == 0:
                work()
        return None

    def as_main_says(self, ask: Callable[[], T], during: str) -> T:
        """What rank 0 finds, on all ranks: disks of other nodes may say something else."""
        if self.environment is None:
            return ask()
        answer: T | None = None
        with _together(during):
            if self.is_main:
                answer = ask()
        found: T = Peers.world().broadcast(answer)  # type: ignore[assignment]
        return found


@contextmanager
def _together(during: str) -> Iterator[None]:
    """`agreement` on an error that stays a mistake of the user if it is one."""
    try:
        with agreement(during):
            yield
    except DistributedError as error:
        if error.error_type == UsageError.__name__:
            raise UsageError(error.message) from None
        raise
