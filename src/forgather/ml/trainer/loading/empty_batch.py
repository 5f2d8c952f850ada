"""Stand-ins for batches that there are none of, which keep ranks in step with each other."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from forgather.ml.trainer.loading.collation import require_mapping
from forgather.ml.trainer.step_loss.token_weighting import IGNORE_INDEX


class EmptyBatch(dict[str, Any]):
    """A batch of the usual shapes that counts nothing: no target, no token, no sample.

    The rank that gets it runs forward and backward as the others do, and adds zero to the step.
    """


def emptied(batch: Mapping[str, Any]) -> EmptyBatch:
    """A batch without targets in the shape of another."""
    require_mapping(batch)
    empty = EmptyBatch(batch)
    labels = empty.get("labels")
    # Labels of other types cannot say "ignored"; that the batch is an empty one says it for them.
    if isinstance(labels, Tensor) and labels.dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        empty["labels"] = torch.full_like(labels, IGNORE_INDEX)
    return empty
