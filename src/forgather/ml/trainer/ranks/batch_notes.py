"""Batch notes: what ranks tell each other about each training batch, in one small all-reduce per batch.

The all-reduce runs while the step before computes (`synchronized_dataloader`), so that agreeing costs no waiting.
`RankFeed` collects the notes; `SoloFeed` is its counterpart for one process.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

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

Sum = Callable[[Tensor], Tensor]


class BatchNotes(NamedTuple):
    """Numbers about one batch of one rank; the loader sums each of them over all ranks."""

    targets: int = 0
    batches: int = 0
    """1 for a real batch, 0 for one that only stands in."""
    unknown: int = 0
    """1 while the number of targets is not known on the host."""
    bad_gradients: int = 0
    stop_signals: tuple[int, ...] = (0,) * len(STOP_SIGNAL_NAMES)
    """One flag for each of `STOP_SIGNAL_NAMES`."""

    def flat(self) -> list[int]:
        return [self.targets, self.batches, self.unknown, self.bad_gradients, *self.stop_signals]

    @classmethod
    def of(cls, numbers: list[int]) -> "BatchNotes":
        """Notes from the sums of an exchange; none were made before the first batch."""
        if not numbers:
            return cls()
        targets, batches, unknown, bad_gradients, *stops = numbers
        return cls(targets, batches, unknown, bad_gradients, tuple(stops))


def stop_flags(received: str | None) -> tuple[int, ...]:
    return tuple(int(name == received) for name in STOP_SIGNAL_NAMES)


def signal_of(flags: tuple[int, ...]) -> str | None:
    return next((name for name, flag in zip(STOP_SIGNAL_NAMES, flags, strict=False) if flag), None)


class SoloFeed:
    """Training batches of one process: targets are counted when a window is fetched."""

    loss: ModelLoss
    """The loss of training, which is made after the loaders."""

    def __init__(self, watch: GradientWatch, received: Callable[[], str | None]) -> None:
        self._watch = watch
        self._received = received

    def begin_pass(self) -> None:
        """A pass over the loader begins."""

    def taken(self, batch: Batch) -> None:
        """A batch was taken from the loader."""

    def count(self, window: Window) -> None:
        """Fill in the numbers of targets of a window."""
        count = self.loss.count
        if window.prepared:
            window.counts = [count(labels, batch) for batch, labels in window.labelled]
        else:
            window.counts = [count(batch.get("labels"), batch) for batch in window.batches]
        window.total = sum(window.counts)
        window.num_shares = len(window.batches)

    @property
    def gradients_look_bad(self) -> bool:
        """Whether numbers should be settled now, because a norm is not finite; the same on every rank."""
        return self._watch.has_news

    @property
    def stop_signal(self) -> str | None:
        """The signal that asked this job to stop."""
        return self._received()

    def stop(self, signal_name: str) -> None:
        """Note a signal that ranks have agreed on elsewhere, such as in an evaluation."""


class RankFeed:
    """Training batches of several ranks: counts come with the notes that the loader exchanges.

    Notes about a batch are made when it is fetched, one batch ahead of its use; `_own_counts` and `_notes` hold them
    until the batch is in a window.
    """

    loss: ModelLoss

    def __init__(
        self,
        watch: GradientWatch,
        received: Callable[[], str | None],
        total: Sum,
        speaks: bool,
        counts_early: bool,
    ) -> None:
        """`speaks`: of the ranks that train on the same batches, this one counts them. `counts_early` is False where the
        labels of a batch are known only when its window is fetched.
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

    def about(self, item: object) -> list[int]:
        """The notes of this rank about a batch that was just fetched, or about `NOTHING`."""
        own = self._about_batch(item) if item is not NOTHING else BatchNotes()
        if not self._speaks:
            own = BatchNotes()
        flags = stop_flags(self._received())
        return own._replace(bad_gradients=int(self._watch.has_news), stop_signals=flags).flat()

    def _about_batch(self, item: object) -> BatchNotes:
        if isinstance(item, EmptyBatch):
            self._own_counts.append(0)
            return BatchNotes()
        batch = require_mapping(item)
        knows = self.loss.can_count and self._counts_early
        count: int | Tensor = self.loss.count(batch.get("labels"), batch) if knows else -1
        self._own_counts.append(count)
        is_unknown = isinstance(count, Tensor) or count < 0
        return BatchNotes(0 if is_unknown else int(count), 1, int(is_unknown))

    def begin_pass(self) -> None:
        self._own_counts.clear()
        self._notes.clear()

    def taken(self, batch: Batch) -> None:
        assert self._loader is not None
        self._notes.append(BatchNotes.of(self._loader.noted))

    def count(self, window: Window) -> None:
        window.counts = [self._own_counts.popleft() for _ in window.batches]
        notes = [self._notes.popleft() for _ in window.batches]
        window.total = sum(note.targets for note in notes)
        window.num_shares = sum(note.batches for note in notes)
        if any(note.unknown for note in notes):
            self._count_now(window)

    def _count_now(self, window: Window) -> None:
        """For the first steps, before the loss is known, and for labels that are on a device already."""
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

    def stop(self, signal_name: str) -> None:
        self._agreed_signal = signal_name

    @property
    def _latest(self) -> BatchNotes:
        assert self._loader is not None
        return BatchNotes.of(self._loader.latest_notes())


Feed = SoloFeed | RankFeed
