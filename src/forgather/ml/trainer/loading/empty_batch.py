"""EmptyBatch: placeholder for a rank without data in the last round, so that all ranks run the same collectives.

`OrderedLoader` and `DataloaderDispatcher` create it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from forgather.ml.distributed.rank_messages import register_type
from forgather.ml.trainer.loading.collation import require_mapping
from forgather.ml.trainer.step_loss.token_weighting import IGNORE_INDEX


class EmptyBatch(dict[str, Any]):
    """Batch with the usual shapes that counts as zero targets, tokens and samples.

    The rank with this batch runs forward and backward like the other ranks, and adds zero to the step.
    """


register_type(EmptyBatch, dict, EmptyBatch)


def emptied(batch: Mapping[str, Any]) -> EmptyBatch:
    """Return a copy of a batch without targets."""
    require_mapping(batch)
    empty = EmptyBatch(batch)
    labels = empty.get("labels")
    # Labels of other dtypes have no ignored value. For them only the type EmptyBatch sets the weight to zero.
    if isinstance(labels, Tensor) and labels.dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        empty["labels"] = torch.full_like(labels, IGNORE_INDEX)
    return empty
