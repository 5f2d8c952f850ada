"""Nested values: tensors in tuples, lists and dicts, such as the logits of a model with several heads.

`leaves_of` and `layout_of` take a value apart; `filled` puts it together. The layout is a plain value, which ranks compare
and send. Used by all modules that collect predictions.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Layout = Any
"""Structure of a nested value: each tensor is replaced by the index of its leaf. None stands for itself."""


def leaves_of(value: object, name: str = "predictions") -> list[Tensor]:
    """Return the tensors of a nested value; raise TypeError for other objects. `name` is for the message."""
    if value is None:
        return []
    if isinstance(value, Tensor):
        return [value.detach()]
    if isinstance(value, (np.ndarray, np.generic, bool, int, float)):
        return [torch.as_tensor(value)]
    if isinstance(value, Mapping):
        return [leaf for key in _keys(value) for leaf in leaves_of(value[key], f"{name}[{key!r}]")]
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        names = getattr(value, "_fields", None) or [f"{name}[{place}]" for place in range(len(value))]
        return [leaf for part_name, part in zip(names, value, strict=True) for leaf in leaves_of(part, part_name)]
    raise TypeError(
        f"{name} is a {type(value).__name__}, which cannot be collected from all ranks: it must be a tensor, or a tuple, list "
        "or dict of tensors. Return only tensors in preprocess_logits_for_metrics, or list the key of this output in "
        "model.config.keys_to_ignore_at_inference."
    )


def layout_of(value: object) -> Layout:
    """Return the structure of a nested value. Equal layouts mean leaves in the same order."""
    return _numbered(value, [0])


def filled(layout: Layout, leaves: Sequence[Any]) -> Any:
    """Return a nested value with this structure and these leaves."""
    if layout is None:
        return None
    if isinstance(layout, int):
        return leaves[layout]
    if isinstance(layout, dict):
        return {key: filled(part, leaves) for key, part in layout.items()}
    return type(layout)(filled(part, leaves) for part in layout)


def _numbered(value: object, used: list[int]) -> Layout:
    if value is None:
        return None
    if isinstance(value, Mapping):
        # Numbered in the order of the keys, so that the order of entries may differ between batches.
        parts = {key: _numbered(value[key], used) for key in _keys(value)}
        return {key: parts[key] for key in value}
    if isinstance(value, Sequence):
        numbered = [_numbered(part, used) for part in value]
        return numbered if isinstance(value, list) else tuple(numbered)
    used[0] += 1
    return used[0] - 1


def _keys(value: Mapping[Any, Any]) -> list[Any]:
    return sorted(value, key=str)
