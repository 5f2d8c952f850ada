"""Rescaling of a loss: a wrapper that multiplies the mean of another loss function.

Trainers wrap the loss to weight micro-batches in gradient accumulation; evaluation uses `no_rescale`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


class RescaleLoss:
    """Loss function that multiplies the mean of another loss function by `scale_factor`.

    Subclasses that weight each micro-batch override `rescale`, which receives the labels; calling the loss calls it.
    """

    def __init__(self, unwrapped_loss_fn: Callable[..., Tensor], scale_factor: float = 1.0) -> None:
        self.unwrapped_loss_fn = unwrapped_loss_fn
        self.scale_factor = scale_factor
        # `inspect.signature` follows `__wrapped__`, so callers see the parameters of the inner loss.
        self.__wrapped__ = unwrapped_loss_fn
        self._rescaling = True

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        mean = self.unwrapped_loss_fn(*args, **kwargs)
        labels: Tensor | None = kwargs.get("labels", args[1] if len(args) > 1 else None)
        return self.rescale(mean, labels)

    @property
    def is_rescaling(self) -> bool:
        """False inside `no_rescale`."""
        return self._rescaling

    def rescale(self, mean: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the rescaled loss of a micro-batch from its mean; inside `no_rescale`, return the mean."""
        return mean * self.scale_factor if self._rescaling else mean

    @contextmanager
    def no_rescale(self) -> Iterator[None]:
        """Return the plain mean inside this context, as evaluation needs it."""
        previous, self._rescaling = self._rescaling, False
        try:
            yield
        finally:
            self._rescaling = previous

    def __getattr__(self, name: str) -> Any:
        # Not a method: trainers test for `num_targets` to learn whether the inner loss can count its targets.
        if name == "num_targets":
            return self.unwrapped_loss_fn.num_targets  # type: ignore[attr-defined]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
