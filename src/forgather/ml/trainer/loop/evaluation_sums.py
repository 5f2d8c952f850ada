"""Evaluation loss: sums of losses and target counts, and the metrics computed from them.

The loss is the mean over all target tokens of the dataset, so it does not depend on the batch size or on the number
of ranks. `Evaluator` fills the sums and adds them up over ranks.
"""

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from forgather.ml.distributed.watch import LOADING, in_phase

SAMPLES_IN_DATASET = "samples in the dataset"
_AS_TEXT = (SAMPLES_IN_DATASET,)
_END = object()


class EvaluationInterrupted(Exception):
    """Raised when a stop signal arrives during an evaluation."""


@dataclass
class EvaluationSums:
    """Losses and counts of an evaluation, collected per batch without a device synchronisation.

    The sums are computed at the end on the CPU, because not every device supports float64.
    """

    num_batches: int = 0
    num_samples: int = 0
    _loss_sum_before: float = 0.0
    _targets_before: int = 0
    _losses: list[Tensor] = field(default_factory=list)
    _counts: list[int | Tensor] = field(default_factory=list)

    def add(self, mean_loss: Tensor | float, targets: int | Tensor, num_samples: int) -> None:
        self._losses.append(torch.as_tensor(mean_loss).detach())
        self._counts.append(targets)
        self.num_batches += 1
        self.num_samples += num_samples

    def add_without_loss(self, num_samples: int) -> None:
        """Count a batch that has no loss, because it has no labels."""
        self.num_batches += 1
        self.num_samples += num_samples

    @classmethod
    def of(cls, loss_sum: float, targets: int, num_batches: int, num_samples: int) -> "EvaluationSums":
        """Return an instance from existing sums, such as the totals over all ranks."""
        return cls(num_batches, num_samples, loss_sum, targets)

    @property
    def loss_sum(self) -> float:
        if not self._losses:
            return self._loss_sum_before
        # One copy for all batches: the host waits for the device once.
        losses = torch.stack(self._losses).cpu().double().tolist()
        products = (loss * count for loss, count in zip(losses, as_integers(self._counts), strict=True))
        return self._loss_sum_before + float(sum(products))

    @property
    def targets(self) -> int:
        return self._targets_before + sum(as_integers(self._counts))

    @property
    def mean(self) -> float:
        """Mean loss per target. NaN without targets, because 0.0 would be chosen as the best loss."""
        targets = self.targets
        return self.loss_sum / targets if targets else math.nan


def as_integers(counts: list[int | Tensor]) -> list[int]:
    """Convert counts to ints, with a single device synchronisation for all tensors among them."""
    on_device = [count for count in counts if isinstance(count, Tensor)]
    if not on_device:
        return [int(count) for count in counts]
    values = iter(torch.stack([count.to(on_device[-1].device) for count in on_device]).tolist())
    return [int(next(values)) if isinstance(count, Tensor) else int(count) for count in counts]


def evaluation_metrics(sums: EvaluationSums, started: float, prefix: str = "eval") -> dict[str, Any]:
    """Return the evaluation metrics under the names that `transformers` uses."""
    runtime = time.perf_counter() - started
    return {
        f"{prefix}_loss": sums.mean,
        f"{prefix}_tokens": sums.targets,
        f"{prefix}_runtime": runtime,
        f"{prefix}_samples_per_second": sums.num_samples / runtime if runtime > 0 else 0.0,
    }


def first_batches(loader: Iterable[Any], limit: int) -> Iterator[Any]:
    """Yield the first `limit` batches of a loader, or all batches if `limit` is negative. Opens it at the first one."""
    with in_phase(LOADING):
        batches = iter(loader if limit < 0 else itertools.islice(loader, limit))
    while True:
        with in_phase(LOADING):
            batch = next(batches, _END)
        if batch is _END:
            return
        yield batch


def no_batches_explanation() -> str:
    return (
        "Why: the dataset is empty, or smaller than one batch with dataloader_drop_last=True.\n"
        "What to change: add samples, lower per_device_eval_batch_size, or set dataloader_drop_last=False."
    )


def no_batches_diagnostic(header: str, settings: Mapping[str, Any], explanation: str) -> str:
    """Return the error message for an evaluation without batches, with a table of the relevant settings."""
    table = "\n".join(f"  {name:<30} {value if name in _AS_TEXT else repr(value)}" for name, value in settings.items())
    return f"{header}\n\n{table}\n\n{explanation}"
