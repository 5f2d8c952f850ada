"""Selection of linear layers for a quantisation recipe, and the report of converted and skipped layers.

Used by `float8` and `qat`, which pass the condition that rules a layer out. The output head stays in full precision.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from torch import nn

logger = logging.getLogger(__name__)

_NUM_NAMES_SHOWN = 3
_CONV1D = ("transformers.pytorch_utils", "Conv1D")
"""Linear layers of GPT-2 and related models; compared by name, since importing transformers takes seconds."""
ObstacleT = Callable[[nn.Linear], str | None]
"""Returns why a layer cannot be converted, or None."""


@dataclass
class LayerReport:
    """Linear layers of a model by name: converted layers, and skipped layers with the reason."""

    converted: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """Layers that were not converted, with the reason."""

    @property
    def total(self) -> int:
        return len(self.converted) + len(self.skipped)

    def log(self, what: str) -> None:
        """Log how many layers were converted, and one line per reason with the skipped layers."""
        # A recipe that converts nothing is probably a mistake.
        level = logging.INFO if self.converted else logging.WARNING
        logger.log(level, "%s: converted %d/%d linear layers.", what, len(self.converted), self.total)
        for reason in dict.fromkeys(self.skipped.values()):
            names = [name for name, one in self.skipped.items() if one == reason]
            logger.log(level, "%s: skipped %s: %s.", what, _shortened(names), reason)


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers by name; a layer with several names appears under the first."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def choose_layers(
    model: nn.Module, keep: Collection[nn.Module], obstacle: ObstacleT
) -> tuple[dict[str, nn.Linear], LayerReport]:
    """Return the layers to convert, and the report."""
    kept = set(keep)
    chosen: dict[str, nn.Linear] = {}
    report = LayerReport()
    for name, layer in linear_layers(model).items():
        reason = "kept in full precision" if layer in kept else obstacle(layer)
        if reason is None:
            chosen[name] = layer
            report.converted.append(name)
        else:
            report.skipped[name] = reason
    for name, module in model.named_modules():
        # The linear layers of GPT-2 are Conv1D modules. Without this entry the report would not mention them.
        if (type(module).__module__, type(module).__name__) == _CONV1D:
            report.skipped[name] = "it is a Conv1D of transformers with a transposed weight, not a plain nn.Linear"
    return chosen, report


def shared_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that more than one module holds."""
    # A set per module: holding the same parameter twice does not make it shared.
    owned = [
        parameter
        for module in model.modules()
        for parameter in {one for one in module._parameters.values() if one is not None}
    ]
    return {parameter for parameter, count in Counter(owned).items() if count > 1}


def output_head(model: nn.Module) -> list[nn.Module]:
    """Return the layer that computes logits, if the model names it: recipes leave it in full precision."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    return [head] if isinstance(head, nn.Module) else []


def guessed_head(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the likely output layer of a model that does not name it.

    The last linear layer with as many outputs as an embedding has entries, otherwise the last linear layer. For full
    models only: each pipeline stage has a last layer.
    """
    layers = linear_layers(model)
    sizes = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    names = [name for name, layer in layers.items() if layer.out_features in sizes] or list(layers)
    return {names[-1]: layers[names[-1]]} if names else {}


def _shortened(names: list[str]) -> str:
    shown = ", ".join(names[:_NUM_NAMES_SHOWN])
    num_more = len(names) - _NUM_NAMES_SHOWN
    return f"{shown} and {num_more} more" if num_more > 0 else shown
