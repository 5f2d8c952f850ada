"""Watchdog for steps without target tokens, which run normally but train nothing.

It never synchronises with the device: counts that are on a device are read only when a log interval is reduced.
`Reporter` calls it in training, `Evaluator` uses its warning.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from forgather.ml.trainer.loading.empty_batch import EmptyBatch
from forgather.ml.trainer.step_loss.loss_traits import IGNORE_INDEX

logger = logging.getLogger(__name__)

_NUM_FIRST_STEPS = 3

_REMEDY = (
    "The loss decides which labels are targets: a causal loss ignores the first position of each sequence, so labels with "
    "one position have no target. Check the labels from the data collator. For another loss, pass compute_loss_func, a "
    "function of (logits, labels). Give it a method num_targets(labels) if its targets are not simply the labels other than "
    f"{IGNORE_INDEX}."
)


class TargetWatch:
    """Watchdog that warns once about steps without targets."""

    def __init__(self) -> None:
        self.has_seen_targets = False
        self._has_warned = False

    def note(self, batches: Iterable[Mapping[str, Any]], targets: int | Tensor, number: int) -> None:
        """Check step `number` of this process, with `targets` over all its micro-batches and ranks."""
        # A tensor is on the device; `note_interval` checks it once the sums are read.
        if self._has_warned or not isinstance(targets, int):
            return
        self.has_seen_targets = self.has_seen_targets or targets > 0
        if targets > 0:
            return
        shapes = [tuple(labels.shape) for labels in map(_labels_of, batches) if labels is not None]
        if shapes:
            self._warn(
                f"Step {number} of this process had labels other than {IGNORE_INDEX} (shape {shapes[0]}), but the "
                "loss counts none of them as a target"
            )
        # A few steps may consist of ignored labels only, so warn after several.
        elif not self.has_seen_targets and number == _NUM_FIRST_STEPS:
            self._warn(f"The first {_NUM_FIRST_STEPS} steps had no targets")

    def note_interval(self, num_steps: int, targets: float) -> None:
        """Check the `targets` of the steps since the last log, after a device synchronisation."""
        if num_steps and targets == 0 and not self.has_seen_targets and not self._has_warned:
            self._warn(f"The first {num_steps} steps had no targets")
        self.has_seen_targets = self.has_seen_targets or targets > 0

    def _warn(self, found: str) -> None:
        self._has_warned = True
        logger.warning("%s: loss and gradients are 0, and nothing is learned. %s", found, _REMEDY)


def warn_of_no_targets(num_batches: int) -> None:
    """Warn about an evaluation with batches but without targets."""
    logger.warning("The evaluation had %d batches but no targets, so eval_loss is NaN. %s", num_batches, _REMEDY)


def _labels_of(batch: Mapping[str, Any]) -> Tensor | None:
    """Return the labels of a batch if any differs from IGNORE_INDEX; labels on a device are not read."""
    labels = batch.get("labels")
    if isinstance(batch, EmptyBatch) or not isinstance(labels, Tensor) or labels.device.type != "cpu":
        return None
    return labels if labels.numel() and bool(torch.any(labels != IGNORE_INDEX)) else None
