"""TrainingLoss: the `loss_fn` of a trainer, which weights each micro-batch by its number of targets.

Inside a step the losses of all micro-batches and ranks add up to one mean over all targets. In evaluation and inside
`no_rescale()` it returns the plain mean. `Trainer._wrap_loss_fn` creates it.
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
    """Loss function of (logits, labels); `scale_factor` is the number of ranks over which gradients are averaged."""

    def __init__(self, loss: ModelLoss, count: Callable[[Window], None], scale_factor: float = 1.0) -> None:
        """Wrap a loss; `count` fills in the numbers of targets of a window, once the loss is resolved."""
        super().__init__(self.plain, scale_factor)
        self._loss = loss
        self._count = count
        self._window: Window | None = None
        self.was_used = False
        """Whether a micro-batch of the current step was weighted."""

    def begin_step(self, window: Window) -> None:
        """Weight the micro-batches that follow by this window."""
        self._window = window
        self.was_used = False

    def end_step(self) -> None:
        self._window = None

    @contextmanager
    def evaluating(self, loss: ModelLoss) -> Iterator[None]:
        """Use plain means of this loss instead of the training loss in this context."""
        trained, self._loss = self._loss, loss
        try:
            with self.no_rescale():
                yield
        finally:
            self._loss = trained

    def __call__(self, logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
        if self._loss.uses_own:
            raise RuntimeError(
                "This run trains on the model's own loss, so there is no loss function of (logits, labels). Call the model "
                "with labels and rescale its loss: self.loss_fn.rescale(outputs.loss, labels). Or pass compute_loss_func to "
                "the trainer."
            )
        self._loss.resolve(logits, labels)
        return self.of(Forward(logits, None), labels)

    def of(self, forward: Forward, labels: Tensor | None) -> Tensor:
        """Return the loss of a forward pass: inside a step the share of the micro-batch, otherwise the mean."""
        window = self._window
        # A negative number: the window has been fetched, but no micro-batch has been handed out yet.
        if window is None or not self._rescaling or window.number < 0:
            return self._loss.mean(forward, labels, self._loss.count(labels, {"labels": labels}))
        count, total = self._counted(window, labels)
        share = self._loss.share(forward, labels, count, total, window.num_shares)
        return share if self.scale_factor == 1 else share * self.scale_factor

    def plain(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean over the targets of a batch."""
        with self.no_rescale():
            return self(logits, labels)

    def rescale(self, mean: Tensor, labels: Tensor | None = None) -> Tensor:
        """Weight a mean that was computed without this loss function, by the number of targets among `labels`."""
        window = self._step_window
        if window is None:
            return mean
        count, total = self._counted(window, labels)
        if isinstance(count, int) and count == 0:
            # A mean over no targets is NaN, and NaN * 0.0 would stay NaN.
            return torch.nan_to_num(mean) * 0.0
        if isinstance(count, Tensor):
            # A count on an accelerator: reading it would make the host wait for the device.
            mean = torch.where(count > 0, mean, torch.zeros_like(mean))
        if not self._loss.token_weighted:
            return self._averaged(mean / max(window.num_shares, 1))
        return self._averaged(mean * (count / (max(total, 1) if isinstance(total, int) else total.clamp(min=1))))

    @property
    def _step_window(self) -> Window | None:
        window = self._window
        return window if self._rescaling and window is not None and window.has_begun else None

    def _counted(self, window: Window, labels: Tensor | None) -> tuple[Count, Count]:
        """Return the number of targets of these labels and of the full step."""
        self.was_used = True
        if window.total is None:
            # First step of a process: the loss was resolved by this forward pass, so targets can be counted only now.
            self._count(window)
        assert window.total is not None
        # An overridden step may split a micro-batch. Labels of another shape are a slice and are counted separately.
        expected = window.labels
        is_part = (
            isinstance(labels, Tensor)
            and isinstance(expected, Tensor)
            and labels is not expected
            and labels.shape != expected.shape
        )
        return (self._loss.count(labels, {}) if is_part else window.count), window.total

    def _averaged(self, share: Tensor) -> Tensor:
        # The gradient all-reduce divides by the number of ranks, but shares already add up over ranks.
        return share if self.scale_factor == 1 else share * self.scale_factor
