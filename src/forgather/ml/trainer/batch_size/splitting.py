"""Splitting of batches by rows: parts of a micro-batch with at most a given number of samples.

Every row is in exactly one part, in order, so the parts of a step have the targets of the unsplit step. `BatchFinder`
splits the windows of a run that has run out of memory.
"""

import itertools
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from forgather.ml.trainer.loading.empty_batch import EmptyBatch
from forgather.ml.trainer.loop.window import samples_in

Batch = Mapping[str, Any]


def rows_in(batch: Batch) -> int:
    """Return the number of rows of a batch; an EmptyBatch has the rows of its placeholder values."""
    return samples_in(dict(batch))


def parts_of(batch: Batch, largest: int) -> list[Batch]:
    """Return the parts of a batch, with sizes that differ by at most one; raise ValueError if it has no common rows."""
    num_rows = rows_in(batch)
    if num_rows <= largest:
        return [batch]
    if isinstance(batch, EmptyBatch):
        # It has zero weight, so its first rows are enough to keep ranks in step.
        return [EmptyBatch(_sliced(batch, 0, largest, num_rows))]
    number = -(-num_rows // largest)
    ends = [num_rows * place // number for place in range(number + 1)]
    return [_sliced(batch, start, stop, num_rows) for start, stop in itertools.pairwise(ends)]


def _sliced(batch: Batch, start: int, stop: int, num_rows: int) -> dict[str, Any]:
    return {name: _slice(name, value, start, stop, num_rows) for name, value in batch.items()}


def _slice(name: str, value: Any, start: int, stop: int, num_rows: int) -> Any:
    if isinstance(value, Mapping):
        return _sliced(value, start, stop, num_rows)
    has_rows = isinstance(value, (list, tuple)) or (isinstance(value, Tensor) and value.ndim > 0)
    if not has_rows:
        return value
    if len(value) != num_rows:
        raise ValueError(
            f"auto_find_batch_size=True cannot split a batch after an out-of-memory error: {name!r} has {len(value)} rows, but "
            f"other values of the batch have {num_rows}. Set a smaller per_device_train_batch_size, or give all values one row "
            "for each sample."
        )
    return value[start:stop]
