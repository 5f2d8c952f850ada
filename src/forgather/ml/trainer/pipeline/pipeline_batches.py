"""Batches as a pipeline needs them: a number of rows that can be divided, the main input apart from the rest."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forgather.ml.trainer.loading.collation import require_mapping
from forgather.ml.trainer.pipeline.schedules.runner import has_rows
from forgather.ml.trainer.step_loss.token_weighting import IGNORE_INDEX

_TAKEN_NAMES = {"target", "losses", "return_outputs", "loss_kwargs"}


class PipelineBatch(NamedTuple):
    """A batch in its parts."""

    inputs: Tensor
    keywords: dict[str, Any]
    labels: Tensor | None


def taken_apart(batch: Mapping[str, Any], main_input: str, num_rows: int) -> PipelineBatch:
    """The parts of a batch, padded to `num_rows` rows or a multiple of them with rows that have no labels."""
    require_mapping(batch)
    parts = dict(batch)
    inputs, labels = parts.pop(main_input, None), parts.pop("labels", None)
    if not isinstance(inputs, Tensor) or inputs.ndim == 0:
        raise ValueError(
            f"The batch has no tensor {main_input!r}, the model's main input, which goes through the stages of a pipeline; it "
            f"has: {', '.join(map(str, batch))}."
        )
    taken = sorted(set(parts) & _TAKEN_NAMES)
    if taken:
        raise ValueError(
            f"The batch has a column {taken[0]!r}, a name that schedules of pipelines use for something else. Rename it, or "
            "let the data collator leave it out."
        )
    rows = inputs.shape[0]
    missing = -rows % num_rows
    if missing == 0:
        return PipelineBatch(inputs, parts, labels)
    parts = {name: _padded(value, missing) if has_rows(value, rows) else value for name, value in parts.items()}
    return PipelineBatch(_padded(inputs, missing), parts, None if labels is None else _without_labels(labels, missing))


def _padded(tensor: Tensor, missing: int) -> Tensor:
    """With copies of the first row, which is as good as any: real values cannot overflow or mask everything."""
    return torch.cat([tensor, tensor[:1].expand(missing, *tensor.shape[1:])])


def _without_labels(labels: Tensor, missing: int) -> Tensor:
    if labels.is_floating_point() or labels.dtype in (torch.bool, torch.uint8):
        raise ValueError(
            f"The last batch is not full, and labels of type {labels.dtype} cannot say that a row is to be ignored. Set "
            "dataloader_drop_last=True, or make the number of samples divisible by the batch size."
        )
    return torch.cat([labels, labels.new_full((missing, *labels.shape[1:]), IGNORE_INDEX)])
