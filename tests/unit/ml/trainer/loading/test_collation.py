"""Default collation of common samples, without a custom collator."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from forgather.ml.trainer.loading.builders import build_train_loader
from forgather.ml.trainer.loading.collation import collate_samples
from tests.support.tiny_models import TokenModel, quiet_trainer, token_samples


def test_values_of_all_kinds_are_stacked() -> None:
    sample = {
        "ids": [1, 2, 3],
        "weights": (0.5, 1.5, 2.5),
        "mask": torch.tensor([True, False, True]),
        "pixels": np.zeros((2, 2), dtype=np.float32),
        "parts": [torch.ones(2), torch.zeros(2)],
        "nested": [[1, 2], [3, 4]],
        "score": 0.5,
        "number": np.int64(4),
    }
    batch = collate_samples([sample, sample])
    assert {name: (tuple(value.shape), value.dtype) for name, value in batch.items()} == {
        "ids": ((2, 3), torch.int64),
        "weights": ((2, 3), torch.float32),
        "mask": ((2, 3), torch.bool),
        "pixels": ((2, 2, 2), torch.float32),
        "parts": ((2, 2, 2), torch.float32),
        "nested": ((2, 2, 2), torch.int64),
        "score": ((2,), torch.float32),
        "number": ((2,), torch.int64),
    }


@pytest.mark.parametrize("name", ["label", "label_ids", "labels"])
def test_label_names_become_labels(name: str) -> None:
    batch = collate_samples([{"x": 1, name: 0}, {"x": 2, name: 1}])
    assert list(batch) == ["x", "labels"]
    assert batch["labels"].tolist() == [0, 1]


def test_strings_and_none_are_dropped() -> None:
    sample = {"ids": [1], "text": "a", "words": ["a", "b"], "nothing": None, "label": None}
    assert list(collate_samples([sample, sample])) == ["ids"]


def test_other_samples_are_collated_by_torch() -> None:
    first, second = collate_samples([(1, 2), (3, 4)])
    assert (first.tolist(), second.tolist()) == ([1, 3], [2, 4])


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([{"ids": [1, 2]}, {"ids": [1]}], r"different lengths of 'ids': 1, 2\..*pass a data_collator"),
        ([{"ids": [[1, 2], [1]]}], r"'ids' of a sample, a list, cannot become a tensor"),
        ([{"ids": object()}], r"'ids' of a sample, a object, cannot become a tensor"),
        ([{"ids": 1}, {"ids": None}], r"'ids' is a number or tensor in some samples, and text or None"),
        ([{"ids": 1}, {"other": 1}], r"A sample has the keys \['other'\].*'ids'"),
        ([{"text": "a"}], r"the keys \['text'\] contain no model inputs.*tokenizer"),
    ],
)
def test_values_that_cannot_be_stacked_are_named(samples: list[Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        collate_samples(samples)


def test_workers_use_the_default_collation() -> None:
    samples = [{"ids": [number, number], "text": "a"} for number in range(4)]
    loader = build_train_loader(samples, batch_size=2, seed=0, shuffle=False, num_workers=1)
    assert [batch["ids"].tolist() for batch in loader] == [[[0, 0], [1, 1]], [[2, 2], [3, 3]]]
    loader.close()


class Classifier(nn.Module):
    """Model that computes its own classification loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)

    def forward(self, features: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        logits = self.head(features)
        return {"logits": logits, "loss": None if labels is None else functional.cross_entropy(logits, labels)}


def test_samples_of_lists_can_be_trained_directly(tmp_path: Path) -> None:
    samples = [{"text": "a", "features": [0.5, 1.0], "label": 1}] * 4
    settings: dict[str, Any] = {"per_device_train_batch_size": 2}
    assert quiet_trainer(tmp_path, Classifier(), samples, **settings).train().global_step == 2
    tokens = [{name: value.tolist() for name, value in sample.items()} for sample in token_samples(4)]
    assert quiet_trainer(tmp_path, TokenModel(), tokens, **settings).train().global_step == 2
