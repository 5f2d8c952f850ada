"""Empty batches: same shapes as the original batch, but no targets."""

from collections import UserDict
from typing import Any

import pytest
import torch

from forgather.ml.trainer.loading.empty_batch import EmptyBatch, emptied


def test_only_the_labels_are_emptied() -> None:
    batch = {"input_ids": torch.arange(6).view(2, 3), "labels": torch.arange(6).view(2, 3), "text": ["a", "b"]}
    empty = emptied(batch)
    assert type(empty) is EmptyBatch and empty.keys() == batch.keys()
    assert empty["labels"].tolist() == [[-100] * 3] * 2 and empty["labels"].dtype == torch.int64
    assert empty["input_ids"] is batch["input_ids"] and empty["text"] == ["a", "b"]
    assert batch["labels"].tolist() == [[0, 1, 2], [3, 4, 5]], "the original batch must not change"


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32])
def test_labels_keep_their_dtype(dtype: torch.dtype) -> None:
    labels = emptied({"labels": torch.ones(4, dtype=dtype)})["labels"]
    assert labels.dtype == dtype and labels.tolist() == [-100] * 4


@pytest.mark.parametrize("labels", [torch.ones(2), torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=torch.uint8)])
def test_labels_without_an_ignore_value_are_kept(labels: torch.Tensor) -> None:
    assert emptied({"labels": labels})["labels"] is labels


@pytest.mark.parametrize("labels", [None, [1, 2], "none"])
def test_non_tensor_labels_are_kept(labels: Any) -> None:
    assert emptied({"labels": labels}) == {"labels": labels}
    assert emptied(UserDict(x=1)) == {"x": 1}


def test_batch_that_is_not_a_mapping_is_explained() -> None:
    with pytest.raises(ValueError, match="A batch is a list, but must be a mapping"):
        emptied([torch.ones(2)])  # type: ignore[arg-type]
