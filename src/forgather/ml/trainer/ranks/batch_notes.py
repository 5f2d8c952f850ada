"""Batch metadata that ranks exchange: target counts, stop signals, gradient flags, saves, requests, replica digests.

One all-reduce per batch carries it. It runs in the background during the previous step (`synchronized_dataloader`), so
agreement costs no wait. All ranks decide from the same sums, and therefore at the same step. The trainer calls
`RankFeed`, or `SoloFeed` in a single process.
"""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from forgather.ml.trainer.loading.collation import require_mapping
from forgather.ml.trainer.loading.data_types import Batch
from forgather.ml.trainer.loading.empty_batch import EmptyBatch
from forgather.ml.trainer.loop.nonfinite import GradientWatch
from forgather.ml.trainer.loop.signals import STOP_SIGNAL_NAMES
from forgather.ml.trainer.loop.window import Window
from forgather.ml.trainer.step_loss.model_loss import ModelLoss
from forgather.ml.trainer.synchronized_dataloader import NOTHING, SynchronizedDataLoader

if TYPE_CHECKING:
    from forgather.ml.trainer.ranks.replica_check import ReplicaCheck

Sum = Callable[[Tensor], Tensor]


class BatchNotes(NamedTuple):
    """Metadata of one batch of one rank as integers; the loader sums each field over all ranks."""

    targets: int = 0
    batches: int = 0
    """1 for a real batch, 0 for an EmptyBatch."""
    unknown: int = 0
    """1 if the number of targets is not known on the host yet."""
    bad_gradients: int = 0
    stop_signals: tuple[int, ...] = (0,) * len(STOP_SIGNAL_NAMES)
    """One flag for each of `STOP_SIGNAL_NAMES`."""
    finished_saves: int = 0
    """Number of background saves that have ended on this rank since the start."""
    requests: int = 0
    """Number of requests of `forgather control` since the start; rank 0 counts them."""
    replicas: tuple[int, ...] = ()
    """Numbers of the replica check (`replica_check_steps`); empty without it, so that messages stay short."""

    def flat(self) -> list[int]:
        # The same length and order on all ranks, since the exchange adds element by element.
        return [
            self.targets,
            self.batches,
            self.unknown,
            self.bad_gradients,
            self.finished_saves,
            self.requests,
            *self.stop_signals,
            *self.replicas,
        ]

    @classmethod
    def of(cls, numbers: list[int]) -> "BatchNotes":
        """Return the metadata of summed integers; an empty list, as before the first batch, gives zeros."""
        if not numbers:
            return cls()
        targets, batches, unknown, bad_gradients, finished_saves, requests, *rest = numbers
        stops, replicas = tuple(rest[: len(STOP_SIGNAL_NAMES)]), tuple(rest[len(STOP_SIGNAL_NAMES) :])
        return cls(targets, batches, unknown, bad_gradients, stops, finished_saves, requests, replicas)


def stop_flags(received: str | None) -> tuple[int, ...]:
    return tuple(int(name == received) for name in STOP_SIGNAL_NAMES)


def signal_of(flags: tuple[int, ...]) -> str | None:
    return next((name for name, flag in zip(STOP_SIGNAL_NAMES, flags, strict=False) if flag), None)


class SoloFeed:
    """Batch metadata of a single process: targets are counted when a window is fetched."""

    loss: ModelLoss
    """Training loss; set after construction, because the loaders are built first."""
    finished_saves: Callable[[], int]
    """Number of background saves that have ended in this process; set after construction, by the saver."""
    asked: Callable[[], int] | None = None
    """Number of requests that this process has received from `forgather control`; None if it cannot receive any."""

    def __init__(self, watch: GradientWatch, received: Callable[[], str | None]) -> None:
        self._watch = watch
        self._received = received

    def begin_pass(self) -> None:
        """Handle the start of a pass over the loader."""

    def taken(self, batch: Batch) -> None:
        """Record that the loader has returned a batch."""

    def count(self, window: Window) -> None:
        """Fill in the numbers of targets of a window."""
        count = self.loss.count
        # An overridden `_prepare_batch` may have changed the labels.
        if window.prepared:
            window.counts = [count(labels, batch) for batch, labels in window.labelled]
        else:
            window.counts = [count(batch.get("labels"), batch) for batch in window.batches]
        window.total = sum(window.counts)
        window.num_shares = sum(not isinstance(batch, EmptyBatch) for batch in window.batches)

    def is_empty(self, window: Window) -> bool:
        """Return whether a window that is not counted yet has no samples on any rank; equal on all ranks."""
        return all(isinstance(batch, EmptyBatch) for batch in window.batches)

    def drop(self, window: Window) -> None:
        """Forget a window that is not counted yet, because its step is passed over."""

    @property
    def gradients_look_bad(self) -> bool:
        """Whether to check the recorded norms now, because one is not finite; equal on all ranks."""
        return self._watch.has_news

    @property
    def stop_signal(self) -> str | None:
        """Name of the signal that requested this job to stop, or None."""
        return self._received()

    def all_have_finished(self, num_saves: int) -> bool:
        """Return whether this number of background saves has ended on every rank; equal on all ranks."""
        return self.finished_saves() == num_saves

    def stop(self, signal_name: str) -> None:
        """Record a signal on which ranks have agreed elsewhere, such as in an evaluation."""

    @property
    def num_requests(self) -> int:
        """Number of requests of `forgather control` since the start; equal on all ranks."""
        return 0 if self.asked is None else self.asked()


class RankFeed:
    """Batch metadata of several ranks: the loader exchanges it together with each batch.

    The metadata of a batch is computed when the batch is fetched, up to one batch ahead of its use.
    """

    # The queues `_own_counts` and `_notes` bridge that distance: `about` appends at the fetch, `taken` when the batch is
    # handed out, and `count` removes both when the batch is in a window. The number of entries is equal on all ranks,
    # because all ranks fetch and take their batches in the same order.

    loss: ModelLoss
    finished_saves: Callable[[], int] | None = None
    _replicas: "ReplicaCheck | None" = None
    asked: Callable[[], int] | None = None

    def __init__(
        self,
        watch: GradientWatch,
        received: Callable[[], str | None],
        total: Sum,
        speaks: bool,
        counts_early: bool,
    ) -> None:
        """Set up the exchange; `total` sums a tensor over all ranks.

        `speaks` is True on one of the ranks that train on the same batches; this rank reports their counts.
        `counts_early` is False if the labels of a batch are known only when its window is fetched.
        """
        self._solo = SoloFeed(watch, received)
        self._watch = watch
        self._received = received
        self._sum = total
        self._speaks = speaks
        self._counts_early = counts_early
        self._loader: SynchronizedDataLoader | None = None
        self._agreed_signal: str | None = None
        self._own_counts: deque[int | Tensor] = deque()
        self._notes: deque[BatchNotes] = deque()

    def follow(self, loader: SynchronizedDataLoader) -> None:
        self._loader = loader

    def follow_replicas(self, check: "ReplicaCheck") -> None:
        """Exchange the numbers of a replica check with each batch."""
        self._replicas = check
        check.latest = lambda: self._latest.replicas

    def about(self, item: object) -> list[int]:
        """Return the metadata of this rank for a batch that was just fetched, or for `NOTHING`."""
        own = self._about_batch(item) if item is not NOTHING else BatchNotes()
        # Ranks with copies of a batch (the stages of a pipeline) report zeros, so that each batch is counted once. They
        # still queue their own count, and they still report signals and bad gradients.
        if not self._speaks:
            own = BatchNotes()
        flags = stop_flags(self._received())
        # The loader fetches its first batches before there is a saver.
        saves = 0 if self.finished_saves is None else self.finished_saves()
        asked = 0 if self.asked is None else self.asked()
        bad = int(self._watch.has_news)
        own = own._replace(bad_gradients=bad, stop_signals=flags, finished_saves=saves, requests=asked)
        if self._replicas is not None and self._loader is not None:
            # The previous exchange is complete on all ranks when a batch is fetched.
            own = own._replace(replicas=self._replicas.notes(BatchNotes.of(self._loader.noted).replicas))
        return own.flat()

    def _about_batch(self, item: object) -> BatchNotes:
        if isinstance(item, EmptyBatch):
            self._own_counts.append(0)
            return BatchNotes()
        batch = require_mapping(item)
        knows = self.loss.can_count and self._counts_early
        count: int | Tensor = self.loss.count(batch.get("labels"), batch) if knows else -1
        self._own_counts.append(count)
        # A count on an accelerator is not read here: the host would wait for the device in every step.
        is_unknown = isinstance(count, Tensor) or count < 0
        return BatchNotes(0 if is_unknown else int(count), 1, int(is_unknown))

    def begin_pass(self) -> None:
        # The previous pass may have fetched a batch ahead that never reached a window.
        self._own_counts.clear()
        self._notes.clear()

    def taken(self, batch: Batch) -> None:
        assert self._loader is not None
        self._notes.append(BatchNotes.of(self._loader.noted))

    def count(self, window: Window) -> None:
        window.counts = [self._own_counts.popleft() for _ in range(window.num_fetched)]
        notes = [self._notes.popleft() for _ in range(window.num_fetched)]
        if window.is_split:
            window.counts = [self.loss.count(labels, batch) for batch, labels in window.labelled]
        window.total = sum(note.targets for note in notes)
        window.num_shares = sum(note.batches for note in notes)
        # `unknown` is a sum over ranks, so all ranks enter the collective in `_count_now` or none does.
        if any(note.unknown for note in notes):
            self._count_now(window)

    def is_empty(self, window: Window) -> bool:
        notes = (self._notes[place] for place in range(window.num_fetched))
        return sum(note.batches for note in notes) == 0

    def drop(self, window: Window) -> None:
        for _ in range(window.num_fetched):
            self._own_counts.popleft()
            self._notes.popleft()

    def _count_now(self, window: Window) -> None:
        """Count the targets of a window and sum them over all ranks now; collective."""
        # Needed for the first steps, since the batches fetched before the loss was resolved have no counts, and for
        # labels that are already on an accelerator.
        num_shares = window.num_shares
        self._solo.loss = self.loss
        self._solo.count(window)
        assert window.total is not None
        own = int(window.total) if self._speaks else 0
        window.total = int(self._sum(torch.tensor([own], dtype=torch.int64)))
        window.num_shares = num_shares

    @property
    def gradients_look_bad(self) -> bool:
        return self._loader is not None and self._latest.bad_gradients > 0

    @property
    def stop_signal(self) -> str | None:
        if self._agreed_signal is None and self._loader is not None:
            self._agreed_signal = signal_of(self._latest.stop_signals)
        return self._agreed_signal

    def all_have_finished(self, num_saves: int) -> bool:
        # A sum of counts and not of flags: metadata from before the save was started cannot reach it.
        return self._loader is not None and self._latest.finished_saves == num_saves * self._loader.num_ranks

    def stop(self, signal_name: str) -> None:
        self._agreed_signal = signal_name

    @property
    def num_requests(self) -> int:
        return 0 if self._loader is None else self._latest.requests

    @property
    def _latest(self) -> BatchNotes:
        # May belong to the next batch, which was fetched ahead. That is the newest exchange on every rank, so all ranks
        # read the same sums here.
        assert self._loader is not None
        return BatchNotes.of(self._loader.latest_notes())


Feed = SoloFeed | RankFeed
