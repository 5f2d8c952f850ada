"""TrainingLoss: the `loss_fn` of a trainer, which weighs each micro-batch by its targets.

Inside a step the losses of all micro-batches and ranks add up to one mean over all targets. In evaluation and inside
`no_rescale()` it is the plain mean. `Trainer._wrap_loss_fn` makes it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from forgather.ml.loss.rescale_loss import RescaleLoss
from forgather.ml.trainer.loop.window import Count, Window
from forgather.ml.trainer.step_loss.model_loss import Forward, ModelLoss


class TrainingLoss(RescaleLoss):
    """Loss function of (logits, labels); `scale_factor` is the number of ranks that gradients are averaged over."""

    def __init__(self, loss: ModelLoss, count: Callable[[Window], None], scale_factor: float = 1.0) -> None:
        """`count` fills in the targets of a window, once the loss knows which labels count."""
        super().__init__(self.plain, scale_factor)
        self._loss = loss
        self._count = count
        self._window: Window | None = None
        self.was_used = False
        """Whether a micro-batch of the present step was weighed."""

    def begin_step(self, window: Window) -> None:
        """Weigh micro-batches by this window from now on."""
        self._window = window
        self.was_used = False

    def end_step(self) -> None:
        self._window = None

    @contextmanager
    def evaluating(self, loss: ModelLoss) -> Iterator[None]:
        """Plain means of this loss in place of training's, in an evaluation."""
        trained, self._loss = self._loss, loss
        try:
            with self.no_rescale():
                yield
        finally:
            self._loss = trained

    def __call__(self, logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
        if self._loss.uses_own:
            raise RuntimeError(
                "This run trains on the loss that the model computes itself, so that there is no loss function of (logits, "
                "labels). Call the model with labels and weigh its loss: self.loss_fn.rescale(outputs.loss, labels). Or pass "
                "compute_loss_func to the trainer."
            )
        self._loss.resolve(logits, labels)
        return self.of(Forward(logits, None), labels)

    def of(self, forward: Forward, labels: Tensor | None) -> Tensor:
        """The loss of a forward pass: the micro-batch's share of the step inside a step, else the mean."""
        window = self._window
        if window is None or not self._rescaling or window.number < 0:
            return self._loss.mean(forward, labels, self._loss.count(labels, {"labels": labels}))
        count, total = self._counted(window, labels)
        share = self._loss.share(forward, labels, count, total, window.num_shares)
        return share if self.scale_factor == 1 else share * self.scale_factor

    def plain(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean over the targets of a batch."""
        with self.no_rescale():
            return self(logits, labels)

    def rescale(self, mean: Tensor, labels: Tensor | None = None) -> Tensor:
        """Weigh a mean that was computed otherwise, by the targets among its labels."""
        window = self._step_window
        if window is None:
            return mean
        count, total = self._counted(window, labels)
        if isinstance(count, int) and count == 0:
            # A mean over nothing is NaN, and so would be its gradients.
            return torch.nan_to_num(mean) * 0.0
        if isinstance(count, Tensor):
            # On a device: to look at the number would mean to wait for it.
            mean = torch.where(count > 0, mean, torch.zeros_like(mean))
        if not self._loss.token_weighted:
            return self._averaged(mean / max(window.num_shares, 1))
        return self._averaged(mean * (count / (max(total, 1) if isinstance(total, int) else total.clamp(min=1))))

    @property
    def _step_window(self) -> Window | None:
        window = self._window
        return window if self._rescaling and window is not None and window.has_begun else None

    def _counted(self, window: Window, labels: Tensor | None) -> tuple[Count, Count]:
        """Targets of these labels and of the whole step; labels of a part of the micro-batch are counted by themselves."""
        self.was_used = True
        if window.total is None:
            # The first step of a process: only now is it known which positions count.
            self._count(window)
        assert window.total is not None
        expected = window.labels
        is_part = (
            isinstance(labels, Tensor)
            and isinstance(expected, Tensor)
            and labels is not expected
            and labels.shape != expected.shape
        )
        return (self._loss.count(labels, {}) if is_part else window.count), window.total

    def _averaged(self, share: Tensor) -> Tensor:
        return share if self.scale_factor == 1 else share * self.scale_factor
