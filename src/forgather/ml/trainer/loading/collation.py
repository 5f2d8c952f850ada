"""Default collator: stacks samples to a batch if the trainer got no `data_collator`.

Its errors name the column or the sample, and a remedy. `builders` passes it to the DataLoader.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from forgather.ml.trainer.loading.data_errors import place_of
from forgather.ml.trainer.loading.data_types import Batch

_LABEL_NAMES = ("labels", "label", "label_ids")
"""Columns for labels; the first of them in a sample becomes "labels" of the batch, as in `transformers`."""


def collate_samples(samples: Sequence[Any]) -> object:
    """Stack samples key by key; samples are mappings of tensors, arrays, numbers and lists of numbers.

    Strings, lists of strings and None are omitted, because a model cannot use them. Samples that are not mappings are
    passed to torch's `default_collate`.
    """
    if not all(isinstance(sample, Mapping) for sample in samples):
        return _collated_without_names(samples)
    batch = {}
    # A column is used or omitted for all samples of a batch, because the model gets one tensor per name.
    for name, source in _sources(samples[0]).items():
        values = [_value(sample, source) for sample in samples]
        if not any(_is_left_out(value) for value in values):
            batch[name] = _stacked(source, values)
        elif not all(_is_left_out(value) for value in values):
            raise ValueError(
                f"{source!r} is a number or tensor in some samples, and text or None in others. Fill in the missing values, "
                "remove the column, or pass a data_collator that handles them."
            )
    if not batch:
        raise ValueError(
            f"Samples with the keys {list(samples[0])} contain no model inputs: all values are text or None. Run the tokenizer "
            "on the dataset first, or pass a data_collator that does."
        )
    return batch


def _collated_without_names(samples: Sequence[Any]) -> object:
    for position, sample in enumerate(samples):
        place = place_of(samples, position)
        if sample is None:
            raise ValueError(
                f"{place[0].upper()}{place[1:]} is None: the dataset returned nothing for it, such as a function without a "
                "return statement. Return a dict, remove the sample from the dataset, or pass a data_collator that skips "
                "None."
            )
        if isinstance(sample, Mapping) != isinstance(samples[0], Mapping):
            raise ValueError(
                f"{place[0].upper()}{place[1:]} is a {type(sample).__name__}, but {place_of(samples, 0)} is a "
                f"{type(samples[0]).__name__}. Return all samples as dicts with the same keys, or pass a data_collator that "
                "handles both."
            )
    return default_collate(list(samples))


def require_mapping(batch: object) -> Batch:
    """Return the batch; raise ValueError if it is not a mapping of names to tensors."""
    if batch is None or (isinstance(batch, Mapping) and not batch):
        found = "None" if batch is None else "an empty mapping"
        raise ValueError(
            f"A batch is {found}: the data_collator or the loader returned nothing to train on. Return a mapping of model "
            "arguments, such as {'input_ids': ..., 'labels': ...}; a function without a return statement returns None."
        )
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"A batch is a {type(batch).__name__}, but must be a mapping of model arguments, such as "
            "{'input_ids': ..., 'labels': ...}. Return dicts as samples of the dataset, or pass a data_collator that returns "
            "a dict."
        )
    return batch


def _sources(sample: Mapping[str, Any]) -> dict[str, str]:
    """Return the names in the batch, each with its name in the samples."""
    names = {name: name for name in sample if name not in _LABEL_NAMES}
    label = next((name for name in _LABEL_NAMES if sample.get(name) is not None), None)
    return names if label is None else {**names, "labels": label}


def _value(sample: Mapping[str, Any], name: str) -> object:
    if name not in sample:
        raise ValueError(
            f"A sample has the keys {list(sample)}, but other samples of its batch also have {name!r}. Give all samples the "
            "same keys, or pass a data_collator that handles missing keys."
        )
    return sample[name]


def _is_left_out(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) > 0 and all(_is_left_out(part) for part in value)
    return value is None or isinstance(value, (str, bytes))


def _stacked(name: str, values: list[Any]) -> object:
    if isinstance(values[0], Mapping):
        return default_collate(values)
    tensors = [_tensor(name, value) for value in values]
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if len(set(shapes)) > 1:
        sizes = sorted({shape[0] if len(shape) == 1 else shape for shape in shapes}, key=str)
        shown = ", ".join(str(size) for size in sizes[:8]) + (", ..." if len(sizes) > 8 else "")
        raise ValueError(
            f"The samples of a batch have different lengths of {name!r}: {shown}. Pad or truncate them to one length in the "
            "tokenizer, or pass a data_collator that pads, such as transformers' DataCollatorWithPadding."
        )
    return torch.stack(tensors)


def _tensor(name: str, value: object) -> Tensor:
    try:
        # `as_tensor` does not convert a list of tensors with several elements, and is slow with a list of arrays.
        if isinstance(value, (list, tuple)) and any(isinstance(part, (Tensor, np.ndarray)) for part in value):
            return torch.stack([torch.as_tensor(part) for part in value])
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name!r} of a sample, a {type(value).__name__}, cannot become a tensor: {error}. Remove the column, or pass "
            "a data_collator that handles it."
        ) from error
