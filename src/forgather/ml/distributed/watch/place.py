"""Place of a process among the ranks of a job, and the key that its ranks on a node have in common.

The key comes from the variables of the launcher, so that a rank can register before it has met the others.
"""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Rank, number of ranks, and key of the job."""

    rank: int
    num_ranks: int
    key: tuple[object, ...]


def place_of(rank: int = 0, num_ranks: int = 1, *address: object) -> Place:
    """Describe a rank of the job that meets at `address`. Without an address, no other rank shares its board."""
    if num_ranks == 1 or not address:
        return Place(rank, num_ranks, ("process", os.getpid()))
    attempt = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")]
    # As text: a port is a number in an environment object and text in a variable.
    return Place(rank, num_ranks, (*map(str, address), *attempt, num_ranks))
