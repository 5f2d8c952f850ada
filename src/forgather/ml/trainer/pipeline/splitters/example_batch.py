"""Example micro-batch on the meta device, for splitters that run or trace the model.

Building it consumes no training data: streams are not started, and loaders are not touched. Called by
`PipelineTrainer` and `OwnLossCheck`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from forgather.ml.trainer.loading.builders import is_map_style
from forgather.ml.trainer.loading.collation import collate_samples, require_mapping
from forgather.ml.trainer.loading.data_types import CollateFn
from forgather.ml.trainer.pipeline.pipeline_batches import padded_batch

Example = tuple[tuple[Tensor, ...], dict[str, Any]]
"""Positional and keyword arguments of a micro-batch, on the meta device."""


def example_batch(model: nn.Module, dataset: object, collate: CollateFn | None, num_rows: int) -> Example:
    """Return the main input and the other tensors of a micro-batch, on the meta device.

    Samples come from a map-style dataset. For a stream, dummy token ids are used, because reading it would consume data.
    """
    sample = dict(sample_batch(model, dataset, collate, num_rows))
    labels = sample.pop("labels", None)
    inputs, keywords, _ = padded_batch(sample, labels, main_input_of(model), num_rows)
    return (inputs.to("meta"),), _on_meta(keywords)


def sample_batch(model: nn.Module, dataset: object, collate: CollateFn | None, num_rows: int) -> Mapping[str, Any]:
    """Return a batch of `num_rows` samples of the dataset, or of dummy tokens and labels."""
    if dataset is None or not is_map_style(dataset) or len(dataset) == 0:
        # Ids 0 and 1 exist in every vocabulary. The pattern is irregular, because `OwnLossCheck` compares losses on it.
        tokens = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1], dtype=torch.int64, device="cpu").expand(num_rows, -1)
        return {main_input_of(model): tokens, "labels": tokens}
    samples = [dataset[number % len(dataset)] for number in range(num_rows)]
    batch = collate_samples(samples) if collate is None else collate(samples)
    return dict(require_mapping(batch))


def main_input_of(model: nn.Module) -> str:
    return getattr(model, "main_input_name", "input_ids")


def _on_meta(keywords: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in keywords.items()}
