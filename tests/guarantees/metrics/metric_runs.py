"""Data, metrics and models for tests of metrics: samples know their place in the dataset."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.support.tiny_models import IGNORED, VOCAB_SIZE

BATCH_SIZE = 2


def ordered_samples(num_samples: int) -> list[dict[str, Tensor]]:
    """Return token sequences that begin with their place in the dataset; lengths differ between batches."""
    generator = torch.Generator().manual_seed(5)
    samples = []
    for number in range(num_samples):
        length = 3 + (number // BATCH_SIZE * 2) % 5
        input_ids = torch.randint(0, VOCAB_SIZE, (length,), generator=generator)
        input_ids[0] = number
        samples.append({"input_ids": input_ids, "labels": input_ids.clone()})
    return samples


def order_metrics(prediction: Any) -> dict[str, Any]:
    """Return exact figures: the number of samples, whether they are in order, and counts of correct tokens."""
    logits, labels = prediction.predictions, prediction.label_ids
    is_token = labels != IGNORED
    return {
        "num_samples": len(labels),
        "in_order": float(np.array_equal(labels[:, 0], np.arange(len(labels)))),
        "labelled": is_token.sum(),
        "correct": ((logits.argmax(-1) == labels) & is_token).sum(),
        "mean": logits[is_token].mean(dtype=np.float64),
    }


class Echo(nn.Module):
    """Classifier with its own loss and several outputs; its first logit is the id of the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, sample_id: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        values = sample_id.float() * self.weight
        logits = torch.stack([values, -values], dim=1)
        outputs: dict[str, Any] = {"logits": logits, "heads": (sample_id[:, None], {"last": sample_id.double()})}
        return outputs if labels is None else {"loss": (logits.sum(1) + labels * self.weight).mean(), **outputs}


def ids(*numbers: int) -> list[dict[str, Tensor]]:
    """Return samples for `Echo`."""
    return [{"sample_id": torch.tensor(number), "labels": torch.tensor(float(number % 2))} for number in numbers]
