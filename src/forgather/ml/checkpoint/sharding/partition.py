"""Partition of a state keyed by FQN between the ranks that shard it: each rank writes the full tensors of some names.

The partition follows from names and sizes alone, so all ranks compute the same one. The checkpoint then has the same
form as one of pipeline stages, and loads on any topology. Snapshots and the statefuls of trainers use it.
"""

from collections.abc import Mapping
from itertools import accumulate


def parts_by_size(sizes: Mapping[str, int], num_parts: int) -> dict[str, int]:
    """Return the part of each name: consecutive names in parts of about equal size."""
    # At least 1, so that names without content are spread too.
    weights = [2 * max(1, size) for size in sizes.values()]
    total = max(1, sum(weights))
    ends = accumulate(weights)
    # A name belongs to the part that contains its middle. Consecutive names keep the layers of a model together.
    return {
        name: min(num_parts - 1, (end - weight // 2) * num_parts // total)
        for name, weight, end in zip(sizes, weights, ends, strict=True)
    }
