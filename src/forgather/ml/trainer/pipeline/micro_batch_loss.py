"""MicroBatchLoss: the loss callback of torch's schedule, made for each batch."""

from torch import Tensor

from forgather.ml.trainer.amp import AMPContext
from forgather.ml.trainer.step_loss.token_weighting import StepLoss


class MicroBatchLoss:
    """The share of a micro-batch in the loss of a step, or in the mean of an evaluation batch.

    `total` is the number of targets that losses are divided by. A batch with `is_stand_in` weighs nothing.
    """

    def __init__(self, step_loss: StepLoss, total: int | Tensor, is_stand_in: bool, amp: AMPContext) -> None:
        self._step_loss = step_loss
        self._total = total
        self._is_stand_in = is_stand_in
        self._amp = amp

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        with self._amp.autocast():
            if self._is_stand_in:
                return self._step_loss.nothing(logits)
            count = self._step_loss.count(labels) if self._step_loss.needs_counts else 0
            # Micro-batches are weighed by their targets, so that their number does not matter.
            return self._step_loss.share(logits, labels, count, self._total, 1)


def apply_loss(logits: Tensor, labels: Tensor, loss: MicroBatchLoss) -> Tensor:
    """The loss function that a schedule is made with; each step passes the loss of its batch."""
    return loss(logits, labels)
