"""A loss times a constant."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


class RescaleLoss:
    """Multiplies what a loss function returns by `scale_factor`, such as one over the accumulated micro-batches."""

    def __init__(self, unwrapped_loss_fn: Callable[..., Tensor], scale_factor: float) -> None:
        self.unwrapped_loss_fn = unwrapped_loss_fn
        self.scale_factor = scale_factor
        # `inspect.signature` follows this, so that whoever asks what the loss takes learns what the inner one does.
        self.__wrapped__ = unwrapped_loss_fn
        self._rescaling = True

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = self.unwrapped_loss_fn(*args, **kwargs)
        return loss * self.scale_factor if self._rescaling else loss

    @contextmanager
    def no_rescale(self) -> Iterator[None]:
        """Return the loss as it is meanwhile, as evaluation needs it."""
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
