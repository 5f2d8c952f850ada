"""Rescaling of a loss function's mean."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


class RescaleLoss:
    """A loss function that multiplies the mean of another one by `scale_factor`.

    A subclass that weighs each micro-batch overrides `rescale`, which gets the labels; calling the loss goes through it.
    """

    def __init__(self, unwrapped_loss_fn: Callable[..., Tensor], scale_factor: float = 1.0) -> None:
        self.unwrapped_loss_fn = unwrapped_loss_fn
        self.scale_factor = scale_factor
        # `inspect.signature` follows this, so that whoever asks what the loss takes learns what the inner one does.
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
        """The rescaled loss of a micro-batch, for a mean that was computed otherwise; the mean itself in `no_rescale`."""
        return mean * self.scale_factor if self._rescaling else mean

    @contextmanager
    def no_rescale(self) -> Iterator[None]:
        """Return the plain mean in this context, as evaluation needs it."""
        previous, self._rescaling = self._rescaling, False
        try:
            yield
        finally:
            self._rescaling = previous

    def __getattr__(self, name: str) -> Any:
        # A method would make it look as if every loss function could count its targets.
        if name == "num_targets":
            return self.unwrapped_loss_fn.num_targets  # type: ignore[attr-defined]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
