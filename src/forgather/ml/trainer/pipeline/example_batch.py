"""An example of a micro-batch without values, for splitters that run or trace the model."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from forgather.ml.trainer.data_collator import collate_samples, require_mapping
from forgather.ml.trainer.data_loading import kind_of
from forgather.ml.trainer.pipeline.pipeline_batches import taken_apart

_EXAMPLE_LENGTH = 8


def example_batch(model: nn.Module, dataset: Any, collate: Any, num_rows: int) -> tuple[Tensor, dict[str, Any]]:
    """The main input and the other tensors of a micro-batch, on the meta device.

    Taken from the dataset if that can be asked for single samples; a stream is not begun for it, and token ids of some
    length stand in.
    """
    main_input = getattr(model, "main_input_name", "input_ids")
    if dataset is None or kind_of(dataset) != "map" or len(dataset) == 0:
        return torch.zeros((num_rows, _EXAMPLE_LENGTH), dtype=torch.int64, device="meta"), {}
    samples = [dataset[number % len(dataset)] for number in range(num_rows)]
    batch = (collate or collate_samples)(samples)
    require_mapping(batch)
    inputs, keywords, _ = taken_apart(batch, main_input, num_rows)
    return inputs.to("meta"), _on_meta(keywords)


def _on_meta(keywords: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in keywords.items()}
