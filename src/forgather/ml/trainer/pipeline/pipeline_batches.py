"""Pipeline batches: padding to full micro-batches, and the split into main input, keyword inputs and labels.

All ranks of a pipeline build the same batches, so they agree on shapes without communication. Used by `PipelineModel`,
the schedules and the splitters.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forgather.ml.trainer.step_loss.loss_traits import IGNORE_INDEX

# Parameters of `step` in torch's schedules. The keyword inputs of the batch are passed to the same call.
_TAKEN_NAMES = {"target", "losses", "return_outputs", "loss_kwargs"}


class Meta(NamedTuple):
    """Shape and dtype of a tensor."""

    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "Meta":
        return cls(tensor.shape, tensor.dtype)


Metas = tuple[Meta, ...]


class Signature(NamedTuple):
    """Shapes and dtypes of all tensors of a micro-batch; they determine the shapes between stages."""

    inputs: Meta
    keywords: tuple[tuple[str, Meta], ...]

    @classmethod
    def of(cls, inputs: Tensor, keywords: Mapping[str, Any]) -> "Signature":
        # Sorted by name, so that the order of keys in a batch does not matter.
        tensors = {name: value for name, value in keywords.items() if isinstance(value, Tensor)}
        return cls(Meta.of(inputs), tuple((name, Meta.of(tensors[name])) for name in sorted(tensors)))


class PipelineBatch(NamedTuple):
    """Batch or micro-batch: the main input, all other inputs by name, and the labels."""

    inputs: Tensor
    keywords: dict[str, Any]
    labels: Tensor | None

    @property
    def num_rows(self) -> int:
        return self.inputs.shape[0]

    @property
    def signature(self) -> Signature:
        return Signature.of(self.inputs, self.keywords)

    def micro_batches(self, number: int) -> list["PipelineBatch"]:
        """Return `number` equal micro-batches; a value without a row per sample is repeated in each."""
        size = self.num_rows // number
        return [self._rows(slice(place * size, (place + 1) * size)) for place in range(number)]

    def _rows(self, rows: slice) -> "PipelineBatch":
        keywords = {
            name: value[rows] if has_rows(value, self.num_rows) else value for name, value in self.keywords.items()
        }
        labels = self.labels
        if labels is not None and has_rows(labels, self.num_rows):
            labels = labels[rows]
        return PipelineBatch(self.inputs[rows], keywords, labels)


def has_rows(value: Any, num_rows: int) -> bool:
    # Tensors without a row per sample, such as a mask for all samples, must not be split or padded.
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == num_rows


def require_labels(inputs: Mapping[str, Any], labels: object) -> None:
    """Raise ValueError for a batch without labels."""
    # All ranks have the full batch, so all of them raise here, before any rank waits for another.
    if not isinstance(labels, Tensor):
        raise ValueError(
            f"There is no loss to train on or to evaluate: the batch has no 'labels'; it has: {', '.join(map(str, inputs))}."
        )


def padded_batch(inputs: Mapping[str, Any], labels: Tensor | None, main_input: str, num_rows: int) -> PipelineBatch:
    """Split a batch into its parts and pad it to a multiple of `num_rows` rows; added rows have no labels."""
    keywords = dict(inputs)
    main = keywords.pop(main_input, None)
    if not isinstance(main, Tensor) or main.ndim == 0:
        names = [*inputs, *(() if labels is None else ("labels",))]
        raise ValueError(
            f"The batch has no tensor {main_input!r}, the main input of the model, which the first stage needs. It "
            f"has: {', '.join(map(str, names))}."
        )
    taken = sorted(set(keywords) & _TAKEN_NAMES)
    if taken:
        raise ValueError(
            f"The batch has a column {taken[0]!r}, which is a reserved name in pipeline schedules. Rename it, or "
            "remove it in the data collator."
        )
    rows = main.shape[0]
    missing = -rows % num_rows
    if missing == 0:
        return PipelineBatch(main, keywords, labels)
    keywords = {name: _padded(value, missing) if has_rows(value, rows) else value for name, value in keywords.items()}
    return PipelineBatch(_padded(main, missing), keywords, None if labels is None else _without_labels(labels, missing))


def _padded(tensor: Tensor, missing: int) -> Tensor:
    """Append `missing` copies of the first row."""
    # Real values are safe: they cannot overflow, and their attention mask is not empty.
    return torch.cat([tensor, tensor[:1].expand(missing, *tensor.shape[1:])])


def _without_labels(labels: Tensor, missing: int) -> Tensor:
    if labels.is_floating_point() or labels.dtype in (torch.bool, torch.uint8):
        raise ValueError(
            f"The last batch is not full, and labels of type {labels.dtype} have no value for ignored rows. Set "
            "dataloader_drop_last=True, or make the number of samples divisible by the batch size."
        )
    return torch.cat([labels, labels.new_full((missing, *labels.shape[1:]), IGNORE_INDEX)])
