"""The evaluation loss: a mean over all target tokens of the set, whatever the batch size."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


class EvaluationInterrupted(Exception):
    """A stop request came in the middle of an evaluation."""


@dataclass
class EvaluationSums:
    """What an evaluation adds up, batch by batch, without waiting for the device."""

    loss_sum: Tensor | float = 0.0
    targets: int | Tensor = 0
    num_batches: int = 0
    num_samples: int = 0

    def add(self, mean_loss: Tensor, targets: int | Tensor, num_samples: int) -> None:
        self.loss_sum = self.loss_sum + mean_loss.detach().double() * targets
        self.targets = self.targets + targets
        self.num_batches += 1
        self.num_samples += num_samples

    @property
    def mean(self) -> float:
        targets = float(self.targets)
        return float(self.loss_sum) / targets if targets else 0.0


def evaluation_metrics(sums: EvaluationSums, started: float) -> dict[str, Any]:
    """The result of an evaluation under the names that callbacks and `transformers` users know."""
    runtime = time.perf_counter() - started
    return {
        "eval_loss": sums.mean,
        "eval_tokens": int(sums.targets),
        "eval_runtime": runtime,
        "eval_samples_per_second": sums.num_samples / runtime if runtime > 0 else 0.0,
    }


def first_batches(loader: Iterable[Any], limit: int) -> Iterable[Any]:
    """The batches of a loader, at most `limit` of them; a negative limit is none."""
    for number, batch in enumerate(loader):
        if 0 <= limit <= number:
            return
        yield batch


def no_batches_error(settings: Mapping[str, Any], num_samples: int | None, where: str = "") -> RuntimeError:
    """Explains an evaluation that saw nothing, by the settings that led to it."""
    table = "\n".join(f"  {name:<30} {value!r}" for name, value in settings.items())
    size = "unknown" if num_samples is None else str(num_samples)
    return RuntimeError(
        f"The evaluation had no batch at all{where}: there is nothing to compute a loss from.\n\n"
        f"  {'samples in the dataset':<30} {size}\n{table}\n\n"
        "Why: the dataset is empty, or smaller than a batch while dataloader_drop_last=True drops what is left, or "
        "max_eval_steps is 0.\n"
        "What to change: give more samples, lower per_device_eval_batch_size, set dataloader_drop_last=False, or raise "
        "max_eval_steps (-1 evaluates everything)."
    )


def samples_in(batch: Mapping[str, Any]) -> int:
    """The number of rows of a batch."""
    return next((value.shape[0] for value in batch.values() if isinstance(value, Tensor) and value.ndim > 0), 0)


def checked_by(interrupted: Callable[[], bool], batches: Iterable[Any]) -> Iterable[Any]:
    """The batches, until a stop request comes."""
    for batch in batches:
        if interrupted():
            raise EvaluationInterrupted
        yield batch
