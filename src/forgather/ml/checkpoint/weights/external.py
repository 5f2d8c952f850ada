"""External weights: a callback (`on_load_model_weights`) supplies them for checkpoints saved without `model`.

The checkpoint manager calls it when it loads such a checkpoint, or when the `model` component is not loaded.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.errors import CheckpointLoadError


@dataclass(frozen=True)
class WeightSuppliers:
    """Callbacks of a job that can supply weights, and the model that receives them."""

    callbacks: Iterable[object]
    model: nn.Module | None
    model_parts: Sequence[nn.Module] | None

    def needed_for(self, path: str, loads_model: bool) -> list[Callable[..., object]]:
        """Return the callbacks that supply the weights; an empty list if they are loaded from the checkpoint.

        Raises `CheckpointLoadError` if weights must be supplied and no callback implements `on_load_model_weights`.
        """
        is_left_out = self.model is not None and not loads_model
        if not is_left_out and store.open_checkpoint(path).manifest.weights != "external":
            return []
        suppliers = [one.on_load_model_weights for one in self.callbacks if hasattr(one, "on_load_model_weights")]
        if not suppliers:
            raise CheckpointLoadError(
                f"The model's weights are not loaded from {path} (checkpoint_components lacks 'model', now or when it was "
                "saved), and no callback implements on_load_model_weights. Add such a callback, or set "
                "skip_checkpoint_components=['model'] to keep the current weights."
            )
        return suppliers

    def supply(self, path: str, loads_model: bool) -> bool:
        """Call the callbacks that supply the weights; return False if the checkpoint itself has them."""
        suppliers = self.needed_for(path, loads_model)
        for supplier in suppliers:
            supplier(checkpoint_path=path, model=self.model, model_parts=self.model_parts)
        return bool(suppliers)
