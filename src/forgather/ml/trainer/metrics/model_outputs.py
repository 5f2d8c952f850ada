"""Predictions and labels of an evaluation batch, by the rules of `transformers`.

Predictions are the model output without the loss and without `keys_to_ignore_at_inference`. Labels are the columns in
`label_names`. One element is used alone, several are a tuple. The evaluator calls these functions.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from forgather.ml.trainer.step_loss.model_outputs import own_loss_of
from forgather.ml.utils import unwrap_model

_POSITIONS = ("start_positions", "end_positions")
_CACHE = "past_key_values"


def predictions_of(outputs: object, ignored: Sequence[str]) -> Any:
    """Return the predictions in a model output; None if it has no element besides the loss."""
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping):
        kept = tuple(value for key, value in outputs.items() if key != "loss" and key not in ignored)
    elif isinstance(outputs, Sequence):
        kept = tuple(outputs if own_loss_of(outputs) is None else outputs[1:])
    else:
        kept = (getattr(outputs, "logits", None),)
    kept = tuple(value for value in kept if value is not None)
    if not kept:
        return None
    return kept[0] if len(kept) == 1 else kept


def ignored_keys(model: nn.Module) -> list[str]:
    """Return the keys of the model output that are no predictions, such as the cache of a language model."""
    config = getattr(unwrap_model(model), "config", None)
    return [] if config is None else list(getattr(config, "keys_to_ignore_at_inference", [_CACHE]))


def label_names_of(model: nn.Module, given: Sequence[str] | None) -> list[str]:
    """Return the names of the label columns: the given names, or else the label parameters of the model's forward."""
    if given is not None:
        return list(given)
    parameters = inspect.signature(unwrap_model(model).forward).parameters
    named = [name for name in parameters if "label" in name]
    # Positions of an answer are labels of models for question answering only. Other models may take them as inputs.
    if "QuestionAnswering" in type(unwrap_model(model)).__name__:
        named += [name for name in _POSITIONS if name in parameters]
    # A model without such parameters may still have labels: a loss function of the trainer reads them.
    return named or ["labels"]


def label_ids_of(names: Sequence[str], inputs: Mapping[str, Any], labels: object) -> Any:
    """Return the label columns of a batch: one alone, several as a tuple, None without labels."""
    columns = {**inputs, "labels": labels}
    found = tuple(columns[name] for name in names if columns.get(name) is not None)
    if not found:
        return None
    return found[0] if len(found) == 1 else found


def has_labels(names: Sequence[str], batch: Mapping[str, Any]) -> bool:
    """Return whether a batch has a label column."""
    return any(batch.get(name) is not None for name in (*names, "labels"))
