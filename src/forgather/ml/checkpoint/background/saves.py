"""BackgroundSaves: writes snapshots in a thread, over a separate gloo group, while training continues.

One save is in flight at a time. The training thread takes and stages the snapshot; the thread compares replicas, writes,
commits and applies retention. Invariants: the thread never uses a process group of training, and training changes no
tensor that the thread has yet to read (`UpdateGate`). `CheckpointManager` starts saves here and takes their results.
"""

import atexit
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from forgather.ml.checkpoint.all_ranks import on_every_rank
from forgather.ml.checkpoint.background.arena import StagingArena
from forgather.ml.checkpoint.background.growth import StateGrowth
from forgather.ml.checkpoint.background.low_priority import yield_to_training
from forgather.ml.checkpoint.background.memory_plan import (
    MemoryNeed,
    MemoryPlan,
    free_memory,
    plan_memory,
    size_text,
)
from forgather.ml.checkpoint.background.staged_snapshot import StagedSnapshot, needed_bytes, stage
from forgather.ml.checkpoint.background.update_gate import UpdateGate
from forgather.ml.checkpoint.coordinator import CheckpointCoordinator
from forgather.ml.checkpoint.errors import CheckpointError, CheckpointSaveError
from forgather.ml.checkpoint.files.pacing import Pace, paced
from forgather.ml.checkpoint.snapshot import Snapshot
from forgather.ml.distributed import Peers
from forgather.ml.distributed.groups import get_background_group

logger = logging.getLogger(__name__)

_ROOM = 4
"""Largest state after the first step, in sizes of the state before it: weights and three moments. Takes no memory."""


@dataclass(frozen=True)
class SaveRequest:
    """Arguments of one save, as for `CheckpointCoordinator.write_snapshot`; `then` runs after the commit."""

    path: str
    step: int | None
    metadata: Mapping[str, object]
    before_commit: Callable[[str], None]
    then: Callable[[Peers], None]


@dataclass
class FinishedSave:
    """Result of a background save. An error after the commit leaves a complete checkpoint."""

    path: str
    error: BaseException | None = None
    is_committed: bool = False


class BackgroundSaves:
    """Background saves of one output directory. Construction is collective, and so is every method but the properties."""

    def __init__(self, memory: str | float | None) -> None:
        self._setting = memory
        self._group = get_background_group()
        self._peers = Peers(self._group)
        # No rank leaves before all ranks are connected: a rank that died in between would break the set-up of others.
        self._peers.gather(None, "connecting the ranks for background saves")
        self._arena = StagingArena()
        self.gate = UpdateGate()
        self._has_explained = False
        self._needs: Sequence[MemoryNeed] | None = None
        self._plan = MemoryPlan(0, "")
        self._thread: threading.Thread | None = None
        self._result: FinishedSave | None = None
        self._is_awaited = threading.Event()
        """Whether training waits for the save in flight, which then runs at full speed."""
        self.num_started = 0
        self.num_finished = 0
        """Number of ended saves, also failed ones. Read by other threads."""

    def expect(self, coordinator: CheckpointCoordinator, growth: StateGrowth) -> None:
        """Start to touch the staging memory before the first step, which creates a part of the state."""
        snapshot = self._first_snapshot(coordinator)
        if snapshot is None:
            return
        now = needed_bytes(snapshot)
        # A rank that does not write the weights does not write the moments either.
        later = now + growth.num_bytes if now >= growth.num_bytes_of_weights else now
        plan, _ = self._planned(later, coordinator)
        self._arena.expect(min(plan.limit, later), room=min(plan.limit, _ROOM * now))

    def prepare(self, coordinator: CheckpointCoordinator) -> None:
        """Plan and touch the staging memory before the first save needs it, and observe the next step."""
        self.gate.observe()
        snapshot = self._first_snapshot(coordinator)
        if snapshot is None:
            return
        self._plan_memory(snapshot, coordinator)
        assert self._needs is not None
        self._arena.warm_up(min(self._plan.limit, self._needs[self._peers.rank].num_bytes))

    def _first_snapshot(self, coordinator: CheckpointCoordinator) -> Snapshot | None:
        try:
            return coordinator.take_snapshot(compares_later=True)
        except CheckpointError as error:
            # The same on all ranks. A save may still succeed: its preparations are not made here.
            logger.debug("The memory of background saves is allocated at the first save: %s", error)
            return None

    def start(self, coordinator: CheckpointCoordinator, snapshot: Snapshot, request: SaveRequest) -> None:
        """Stage a snapshot and write it in the background. Return when training may continue up to the `gate`."""
        assert self._thread is None and self._result is None, "one save is in flight at a time"
        self._plan_memory(snapshot, coordinator)
        staged: list[StagedSnapshot] = []
        # The copy needs memory, which one rank may lack. The other ranks must not write without it.
        on_every_rank(
            Peers.world(),
            lambda: staged.append(self._stage(snapshot)),
            "copying the state for a background save",
            CheckpointSaveError,
        )
        if snapshot.exchange is not None:
            snapshot.exchange.use_group(self._group)
        self.num_started += 1
        self._result = FinishedSave(request.path)
        arguments = (coordinator, staged[0], request, self._result)
        self._is_awaited.clear()
        self._thread = threading.Thread(target=self._run, args=arguments, name="checkpoint-save", daemon=True)
        _end_with_process(self._thread)
        if not staged[0].reads.is_done:
            self._is_awaited.set()
        self.gate.hold(staged[0].reads)
        self._thread.start()
        self._explain(staged[0])
        if not staged[0].may_continue:
            staged[0].reads.wait()

    def wait(self) -> None:
        """Wait for the save in flight. Its result stays until `finish` takes it."""
        if self._thread is not None:
            self._is_awaited.set()
            self._thread.join()
            self._thread = None

    def finish(self) -> FinishedSave | None:
        """Wait for the save in flight, and return its result; None without a save."""
        self.wait()
        self.gate.release()
        result, self._result = self._result, None
        return result

    def close(self, finish: Callable[[], object]) -> None:
        """Call `finish`, which takes the last result, and free the staging memory.

        While another error passes, an error of the save is only logged. A second Ctrl-C leaves at once.
        """
        cause = sys.exception()
        self.gate.close()
        if isinstance(cause, KeyboardInterrupt):
            _forget(self._thread)
            return
        try:
            finish()
        except CheckpointError as error:
            if cause is None:
                raise
            logger.error("The background save failed, too: %s", error)
        finally:
            self._arena.close()

    def _plan_memory(self, snapshot: Snapshot, coordinator: CheckpointCoordinator) -> None:
        """Plan the staging memory if there is no plan, or if the state of a rank has grown. Collective."""
        num_bytes, before = needed_bytes(snapshot), self._needs
        plan, needs = self._planned(num_bytes, coordinator)
        if before is not None and all(new.num_bytes <= old.num_bytes for new, old in zip(needs, before, strict=True)):
            return
        self._needs, self._plan = needs, plan
        _log_plan(plan, num_bytes)

    def _planned(self, num_bytes: int, coordinator: CheckpointCoordinator) -> tuple[MemoryPlan, Sequence[MemoryNeed]]:
        """Return a plan for saves of this size on this rank, and the needs of all ranks. Collective."""
        layout = coordinator.layout
        assert layout is not None, "a snapshot was taken"
        needs = Peers.world().gather(MemoryNeed(num_bytes, free_memory(), self._arena.num_bytes))
        node = next(ranks for ranks in layout.nodes if layout.rank in ranks)
        own = list(node).index(layout.rank)
        return plan_memory(self._setting, [needs[rank] for rank in node], own), needs

    def _stage(self, snapshot: Snapshot) -> StagedSnapshot:
        if self._fits:
            return stage(snapshot, self._arena, self._plan.limit)
        return stage(snapshot, self._arena, self._plan.limit, self.gate.storages(), self.gate.checker())

    @property
    def _fits(self) -> bool:
        assert self._needs is not None, "the memory is planned"
        return self._needs[self._peers.rank].num_bytes <= self._plan.limit

    def _explain(self, staged: StagedSnapshot) -> None:
        """Log, once, how a save without room for all copies holds up training."""
        if self._has_explained or not staged.num_live_bytes:
            return
        self._has_explained = True
        size = size_text(staged.num_live_bytes)
        if staged.may_continue:
            logger.info(
                "Background saves read %s of weights and moments without a copy: forward and backward passes continue "
                "meanwhile, and the next optimizer step waits until they are read.",
                size,
            )
        else:
            logger.info(
                "Background saves read %s without a copy while training waits, because a forward pass may change a part of "
                "it, or no step was observed yet.",
                size,
            )

    def _run(
        self, coordinator: CheckpointCoordinator, staged: StagedSnapshot, request: SaveRequest, result: FinishedSave
    ) -> None:
        yield_to_training()
        try:
            on_every_rank(self._peers, staged.arrive, "copying the state from the accelerator", CheckpointSaveError)
            snapshot = _compared(staged.snapshot, self._peers)
            with paced(self._pace()):
                coordinator.write_snapshot(
                    snapshot, request.path, request.step, request.metadata, self._peers, request.before_commit
                )
            result.is_committed = True
            request.then(self._peers)
        except BaseException as error:  # noqa: BLE001 - the training thread raises it
            result.error = error
        finally:
            staged.reads.end()
            self.num_finished += 1
            _forget(threading.current_thread())

    def _pace(self) -> Pace | None:
        # With an accelerator, training leaves most cores to the save.
        return None if torch.accelerator.is_available() else Pace(self._is_awaited)


def _compared(snapshot: Snapshot, peers: Peers) -> Snapshot:
    """Return the snapshot with the verdicts of the comparison that `take_snapshot` left to the background."""
    if snapshot.comparison is None:
        return snapshot
    notes = dict(snapshot.notes)
    for key, verdict in snapshot.comparison.verdicts(peers).items():
        notes[key] = {**notes.get(key, {}), **verdict}
    return replace(snapshot, notes=notes, comparison=None)


def _log_plan(plan: MemoryPlan, num_bytes: int) -> None:
    if num_bytes <= plan.limit:
        logger.info(
            "Background saves copy the state of this rank in full: %s of staging memory, kept between saves (limit %s; %s).",
            *(size_text(num_bytes), size_text(plan.limit), plan.reason),
        )
        return
    logger.warning(
        "Background saves copy the state of this rank in pieces: %s of %s fit the limit (%s). The optimizer step after a "
        "save waits until the other %s are read, at the speed of the disk. To shorten that, raise async_save_memory.",
        *(size_text(plan.limit), size_text(num_bytes), plan.reason, size_text(num_bytes - plan.limit)),
    )


# Threads to wait for at the end of the process. They are daemons, because a second Ctrl-C must not wait.
_running: set[threading.Thread] = set()
_process_id = 0


def _end_with_process(thread: threading.Thread) -> None:
    """Let the process wait for a save before it ends, also if nothing calls `close`."""
    global _process_id
    if _process_id != os.getpid():
        # A forked process inherits the list, but not the threads.
        _running.clear()
        _process_id = os.getpid()
        # Registered at the first save, after the handler that destroys the process groups, and called before it.
        atexit.register(_wait_for_running, _process_id)
    _running.add(thread)


def _wait_for_running(process_id: int) -> None:
    if os.getpid() == process_id:
        for thread in list(_running):
            thread.join()


def _forget(thread: threading.Thread | None) -> None:
    with contextlib.suppress(KeyError):
        if thread is not None:
            _running.remove(thread)
