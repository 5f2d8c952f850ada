"""Gradient-accumulation windows: the micro-batches of one optimizer step, fetched before the first backward pass.

`StepBatches` is the `data_iterator` of `Trainer._train_step`. The first `next()` of a step fetches all its
micro-batches, because the loss weight of each depends on the targets of all of them.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from forgather.ml.distributed.watch import FORWARD_BACKWARD, LOADING, note
from forgather.ml.trainer.loading.collation import require_mapping
from forgather.ml.trainer.loading.empty_batch import EmptyBatch

logger = logging.getLogger(__name__)

Batch = Mapping[str, Any]
Count = int | Tensor
Prepared = tuple[dict[str, Any], Any]
"""Model inputs and labels of one micro-batch."""


@dataclass
class Window:
    """Micro-batches of one step and their target counts."""

    batches: list[Batch]
    counts: list[Count] = field(default_factory=list)
    """Targets of each micro-batch on this rank."""
    total: Count | None = None
    """Targets of the full step, over all micro-batches and data-parallel ranks; None while unknown."""
    num_shares: int = 0
    """Micro-batches of the full step, over all data-parallel ranks, without placeholders (`EmptyBatch`)."""
    prepared: list[Prepared] = field(default_factory=list)
    """Results of an override of `_prepare_batch`; empty without an override."""
    number: int = -1
    """Index of the current micro-batch; -1 before the first."""
    num_fetched: int = 0
    """Micro-batches that the loader yielded, before they were split."""

    def __post_init__(self) -> None:
        self.num_fetched = len(self.batches)
        for batch in self.batches:
            require_mapping(batch)

    def __len__(self) -> int:
        return len(self.batches)

    def split(self, parts_of: Callable[[Batch], list[Batch]]) -> None:
        """Replace each micro-batch by its parts."""
        self.batches = [part for batch in self.batches for part in parts_of(batch)]

    @property
    def is_split(self) -> bool:
        return len(self.batches) != self.num_fetched

    @property
    def labelled(self) -> list[tuple[Batch, Any]]:
        """Micro-batches with the labels used to count their targets."""
        if self.prepared:
            return [(batch, labels) for batch, (_, labels) in zip(self.batches, self.prepared, strict=True)]
        return [(batch, batch.get("labels")) for batch in self.batches]

    @property
    def labels(self) -> Any:
        """Labels used to count the targets of the current micro-batch."""
        return self.prepared[self.number][1] if self.prepared else self.batches[self.number].get("labels")

    @property
    def count(self) -> Count:
        """Targets of the current micro-batch."""
        return self.counts[self.number]

    @property
    def is_stand_in(self) -> bool:
        """Whether the current micro-batch is a placeholder with zero weight, which keeps ranks in step."""
        return isinstance(self.batches[self.number], EmptyBatch)

    @property
    def is_last(self) -> bool:
        return self.number + 1 == len(self.batches)

    @property
    def has_begun(self) -> bool:
        return self.number >= 0


class StepBatches(Iterator[Batch]):
    """Iterator over micro-batches that fetches one window per step."""

    def __init__(self, batches: Iterator[Batch], size: int, drop_last: bool, fetched: Callable[[Window], None]) -> None:
        """`fetched` is called with each window before its first micro-batch is returned."""
        self._batches = batches
        self._size = size
        self._drop_last = drop_last
        self._fetched = fetched
        self._has_warned = False
        self._again: list[Batch] = []
        self._ahead: Window | None = None
        self.current: list[Batch] = []
        """The micro-batches of the current window, for error messages."""
        self.window: Window | None = None
        """The window of the current step; None until its first micro-batch is requested."""

    def begin_step(self) -> None:
        """Discard the current window, so that the next `next()` fetches a new one."""
        window = self.window
        if window is not None and not window.is_last and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "_train_step took %d of the %d micro-batches of a step and skipped the rest. Call next() on the data "
                "iterator until _should_sync_gradients() is True.",
                *(window.number + 1, len(window)),
            )
        self.window = None

    def look(self) -> Window:
        """Fetch the window of the next step without beginning it; raise StopIteration at the end of the epoch."""
        if self._ahead is None:
            self._ahead = self._fetch()
        return self._ahead

    def pass_over(self) -> None:
        """Discard the window that `look` has fetched."""
        self._ahead = None

    def repeat(self) -> None:
        """Let the next `next()` begin a window of the same micro-batches again."""
        self._again, self.window = list(self.current), None

    def __next__(self) -> Batch:
        if self.window is None:
            window, self._ahead = self.look(), None
            # Before `_fetched`, which may raise an error about these batches.
            self.current[:] = window.batches
            self._fetched(window)
            self.window = window
        # A `_train_step` that requests too many micro-batches must not take them from the next step.
        elif self.window.is_last:
            return self._beyond(self.window)
        self.window.number += 1
        # Here and not in `_train_step`, which users override.
        note(FORWARD_BACKWARD)
        return self.window.batches[self.window.number]

    def _fetch(self) -> Window:
        if self._again:
            repeated, self._again = self._again, []
            return Window(repeated)
        batches: list[Batch] = []
        note(LOADING)
        for batch in self._batches:
            batches.append(batch)
            if len(batches) == self._size:
                return Window(batches)
            note(LOADING)
        # The last window of an epoch may be short. dataloader_drop_last drops it, like an incomplete batch.
        if not batches or self._drop_last:
            raise StopIteration
        return Window(batches)

    def _beyond(self, window: Window) -> Batch:
        """Raise StopIteration after a short window, which ends the epoch; raise RuntimeError after a full window."""
        if len(self.current) < self._size:
            raise StopIteration
        raise RuntimeError(
            f"_train_step requested micro-batch {len(window) + 1} of a step, but with gradient_accumulation_steps={self._size} "
            f"a step has {self._size}. Stop at the micro-batch where _should_sync_gradients() is True."
        )


def prepared_once(
    prepare: Callable[[Batch], Prepared], window: Callable[[], Window | None]
) -> Callable[[Batch], Prepared]:
    """Wrap an override of `_prepare_batch` so that it runs once per micro-batch, when the window is fetched."""

    def once(batch: Batch) -> Prepared:
        present = window()
        if present is None:
            return prepare(batch)
        # Loss resolution prepares the first micro-batch before it is handed out, while the index is still -1.
        number = max(present.number, 0)
        return present.prepared[number] if batch is present.batches[number] else prepare(batch)

    return once


def surrounded(
    step: Callable[[dict[str, Any], Any], Tensor], context: Callable[[], AbstractContextManager[None]]
) -> Callable[[dict[str, Any], Any], Tensor]:
    """Wrap an override of `_forward_backward_step` in the context of the strategy, such as delayed gradient reduction."""

    def inside(input_dict: dict[str, Any], labels: Any) -> Tensor:
        with context():
            return step(input_dict, labels)

    return inside


def checked_result(window: Window | None, result: Any, owner: str) -> tuple[Tensor, Tensor | None, int | Tensor]:
    """Return the result of `_train_step`; raise an error if it is not the result of a step."""
    if window is None:
        raise RuntimeError(
            f"{owner}._train_step returned without taking a micro-batch, so training would never end. Take the batches of a "
            "step from the data iterator: batch = next(data_iterator)."
        )
    if not isinstance(result, tuple) or len(result) != 3 or not isinstance(result[0], Tensor):
        raise TypeError(
            f"{owner}._train_step returned {type(result).__name__}, but must return (loss, grad_norm, tokens): a tensor, a "
            "tensor or None, and a number."
        )
    loss, grad_norm, tokens = result
    if grad_norm is not None and not isinstance(grad_norm, Tensor):
        grad_norm = torch.as_tensor(grad_norm)
    return loss, grad_norm, tokens


def samples_in(batch: Mapping[str, Any]) -> int:
    """Return the number of rows of a batch, from its first tensor, else its first list.

    A placeholder (`EmptyBatch`) has 0 rows. A batch without tensors and lists counts as 1.
    """
    if isinstance(batch, EmptyBatch):
        return 0
    rows = next((len(value) for value in batch.values() if isinstance(value, Tensor) and value.ndim > 0), None)
    return _samples_without_tensors(batch) if rows is None else rows


def _samples_without_tensors(batch: Mapping[str, Any]) -> int:
    for value in batch.values():
        if isinstance(value, Mapping):
            return samples_in(value)
        if isinstance(value, (list, tuple)):
            return len(value)
    return 1
