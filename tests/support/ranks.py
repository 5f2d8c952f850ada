"""Run a function of a test on several ranks at once, with a real gloo process group."""

import atexit
import pickle
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

from tests.support.rank_nursery import Nursery
from tests.support.rank_pool import MAX_RANKS, Worker, WorkerPool
from tests.support.rank_protocol import Finished, Job, RankOutcome, Ready

__all__ = ["RankFailure", "RankOutcome", "RankTimeout", "close_pool", "outcomes_on_ranks", "run_on_ranks"]

# Time to start workers and import the test's module, before the test's own time limit starts.
START_SECONDS = 120.0
# How long the other ranks may continue after a failure, before the failed worker is killed so that they notice.
GRACE_SECONDS = 2.0
# Far above the time of any test, also on a slow and busy machine: the limit tells a hang from a slow rank.
DEFAULT_SECONDS = 300.0
MAX_OUTPUT_CHARACTERS = 4000

_pool = WorkerPool()


class RankFailure(AssertionError):
    """Ranks raised or died; `errors` maps each rank to type name, message and traceback."""

    def __init__(self, errors: dict[int, tuple[str, str, str]], world_size: int) -> None:
        self.errors = errors
        sections = [f"--- rank {rank} ---\n{text.rstrip()}" for rank, (_, _, text) in sorted(errors.items())]
        super().__init__(f"{len(errors)} of {world_size} ranks failed\n" + "\n".join(sections))


class RankTimeout(AssertionError):
    """Ranks did not finish in time; the message shows their Python stacks, and the outcomes of the other ranks."""


def run_on_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = DEFAULT_SECONDS) -> list[Any]:
    """Return the results of `fn(*args)` on ranks 0 to `world_size` - 1, in rank order.

    `fn` is a module-level function of an importable module; arguments and results are pickled. On each rank,
    torch.distributed is initialised with gloo for this call, and all random generators are seeded with 0. Raises
    `RankFailure` if a rank raises or dies, and `RankTimeout` if a rank does not finish.
    """
    outcomes = outcomes_on_ranks(fn, world_size, *args, timeout=timeout)
    errors = {
        rank: (str(outcome.error_type), str(outcome.error_message), str(outcome.traceback))
        for rank, outcome in enumerate(outcomes)
        if outcome.failed
    }
    if errors:
        raise RankFailure(errors, world_size)
    return [outcome.value for outcome in outcomes]


def outcomes_on_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = DEFAULT_SECONDS
) -> list[RankOutcome]:
    """Return the outcomes like `run_on_ranks`, but do not raise if a rank raises or dies."""
    _check_request(fn, world_size)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pickled_args = pickle.dumps(args)
    call = _Call(_pool.take(world_size), timeout)
    for rank, worker in enumerate(call.workers):
        worker.send(Job(rank, world_size, store.port, fn.__module__, fn.__qualname__, pickled_args))
    try:
        return call.await_outcomes()
    finally:
        call.release()


def nursery() -> Nursery:
    """Return the process of the pool that forks workers and programs."""
    return _pool.nursery()


def close_pool() -> None:
    """End all worker processes."""
    _pool.close()


atexit.register(close_pool)


def _check_request(fn: Callable[..., Any], world_size: int) -> None:
    if not 1 <= world_size <= MAX_RANKS:
        raise ValueError(
            f"world_size {world_size} is not between 1 and {MAX_RANKS}, the size of the worker pool; "
            "use tests.support.launch.start_ranks for more ranks"
        )
    if "<" in fn.__qualname__ or fn.__module__ == "__main__":
        raise ValueError(
            f"{fn.__module__}.{fn.__qualname__} cannot be imported by the ranks; "
            "pass a function from the top level of an importable test module"
        )


class _Call:
    """Call in progress: ranks that have started, ranks that have finished, and the deadline for the rest."""

    def __init__(self, workers: list[Worker], timeout: float) -> None:
        self.workers = workers
        self._timeout = timeout
        self._outcomes: dict[int, RankOutcome] = {}
        self._not_ready = set(range(len(workers)))
        self._unfit: set[int] = set()
        self._deadline = time.monotonic() + START_SECONDS
        self._first_failure: float | None = None

    def await_outcomes(self) -> list[RankOutcome]:
        while len(self._outcomes) < len(self.workers):
            now = time.monotonic()
            if now > self._deadline:
                raise RankTimeout(self._describe_hang())
            if self._first_failure is not None and now > self._first_failure + GRACE_SECONDS:
                self._kill_failed_ranks()
            self._read_messages(min(self._deadline - now, 0.25))
        return [self._outcomes[rank] for rank in range(len(self.workers))]

    def release(self) -> None:
        """Return reusable workers to the pool, and kill the others."""
        stuck = set(range(len(self.workers))) - self._outcomes.keys()
        for rank in sorted(stuck | self._unfit):
            self.workers[rank].kill()
        _pool.give_back([worker for rank, worker in enumerate(self.workers) if rank not in stuck | self._unfit])

    def _read_messages(self, seconds: float) -> None:
        pending = {w.connection: rank for rank, w in enumerate(self.workers) if rank not in self._outcomes}
        for connection in wait(list(pending), timeout=seconds):
            assert isinstance(connection, Connection)
            rank = pending.pop(connection)
            self._take_message(rank, self.workers[rank].receive())
        for rank in pending.values():
            if self.workers[rank].is_silent_and_dead():
                self._take_message(rank, None)

    def _take_message(self, rank: int, message: Any) -> None:
        self._not_ready.discard(rank)
        if isinstance(message, Finished):
            self._outcomes[rank] = _as_outcome(message, self.workers[rank].output())
        elif message is None:
            self._unfit.add(rank)
            self._outcomes[rank] = _as_death(rank, self.workers[rank])
        elif isinstance(message, Ready) and not self._not_ready:
            self._deadline = time.monotonic() + self._timeout
        if rank in self._outcomes and self._outcomes[rank].failed and self._first_failure is None:
            self._first_failure = time.monotonic()

    def _kill_failed_ranks(self) -> None:
        """Kill the failed ranks, as their error would in a real job: their connections close, so the others notice."""
        for rank, outcome in self._outcomes.items():
            if outcome.failed and rank not in self._unfit:
                self._unfit.add(rank)
                self.workers[rank].kill()

    def _describe_hang(self) -> str:
        stuck = [rank for rank in range(len(self.workers)) if rank not in self._outcomes]
        for rank in stuck:
            self.workers[rank].request_stacks()
        phase = f"to start within {START_SECONDS}" if self._not_ready else f"to finish within {self._timeout}"
        sections = [f"ranks {stuck} of {len(self.workers)} failed {phase} seconds"]
        for rank, worker in enumerate(self.workers):
            if rank in stuck:
                sections.append(f"--- rank {rank} hangs ---\n{worker.stacks().rstrip()}{_excerpt(worker.output())}")
            else:
                outcome = self._outcomes[rank]
                sections.append(f"--- rank {rank} {'failed' if outcome.failed else 'finished'} ---")
                sections.append((outcome.traceback or "").rstrip())
        return "\n".join(sections)


def _as_outcome(message: Finished, output: str) -> RankOutcome:
    if message.error is None:
        assert message.pickled_value is not None, "a rank without error has a value"
        return RankOutcome(value=pickle.loads(message.pickled_value))
    error_type, text, traceback_text = message.error
    return RankOutcome(error_type=error_type, error_message=text, traceback=traceback_text + _excerpt(output))


def _as_death(rank: int, worker: Worker) -> RankOutcome:
    text = f"the process of rank {rank} died with exit code {worker.exit_code()}"
    return RankOutcome(error_type="RankDied", error_message=text, traceback=text + _excerpt(worker.output()))


def _excerpt(output: str) -> str:
    return f"\nOutput of the rank:\n{output[-MAX_OUTPUT_CHARACTERS:]}" if output.strip() else ""
