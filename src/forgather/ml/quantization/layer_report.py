"""Which linear layers of a model a recipe changes, which it leaves as they are, and why."""

import logging
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from torch import nn

logger = logging.getLogger(__name__)

_NUM_NAMES_SHOWN = 3
_CONV1D = ("transformers.pytorch_utils", "Conv1D")
"""The linear layers of GPT-2 and its relatives; told by its name, since importing transformers to ask takes seconds."""
ObstacleT = Callable[[nn.Linear], str | None]
"""Why a layer cannot be changed, None when it can."""


@dataclass
class LayerReport:
    """The linear layers of a model by name."""

    converted: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """Those that were left as they are, and the reason."""

    @property
    def total(self) -> int:
        return len(self.converted) + len(self.skipped)

    def log(self, what: str) -> None:
        """Tell how many layers were converted, and of the others which and why, one line for each reason."""
        level = logging.INFO if self.converted else logging.WARNING
        logger.log(level, "%s: converted %d/%d linear layers.", what, len(self.converted), self.total)
        for reason in dict.fromkeys(self.skipped.values()):
            names = [name for name, one in self.skipped.items() if one == reason]
            logger.log(level, "%s: skipped %s: %s.", what, _shortened(names), reason)


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers by their (first) names."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def choose_layers(
    model: nn.Module, keep: Collection[nn.Module], obstacle: ObstacleT
) -> tuple[dict[str, nn.Linear], LayerReport]:
    """The layers to convert, and the report of it."""
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
        if (type(module).__module__, type(module).__name__) == _CONV1D:
            report.skipped[name] = "it is a Conv1D of transformers, whose weight is transposed, not a plain nn.Linear"
    return chosen, report


def shared_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Parameters that several modules have."""
    owned = [
        parameter
        for module in model.modules()
        for parameter in {one for one in module._parameters.values() if one is not None}
    ]
    return {parameter for parameter, count in Counter(owned).items() if count > 1}


def output_head(model: nn.Module) -> list[nn.Module]:
    """The layer that makes logits, where a model says which it is: recipes leave it in full precision."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    return [head] if isinstance(head, nn.Module) else []


def guessed_head(model: nn.Module) -> dict[str, nn.Linear]:
    """The output layer of a model that does not say which it is: the last linear layer with an output for each entry of an
    embedding, else the last one.

    Of whole models only: each stage of a pipeline has a last layer.
    """
    layers = linear_layers(model)
    sizes = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    names = [name for name, layer in layers.items() if layer.out_features in sizes] or list(layers)
    return {names[-1]: layers[names[-1]]} if names else {}


def _shortened(names: list[str]) -> str:
    shown = ", ".join(names[:_NUM_NAMES_SHOWN])
    num_more = len(names) - _NUM_NAMES_SHOWN
    return f"{shown} and {num_more} more" if num_more > 0 else shown
