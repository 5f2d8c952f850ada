"""Layout of ranks: the process groups, nodes and storages that ranks share.

Every rank gathers the same layout, so that all ranks derive the same plan of writers and readers without further
communication. The coordinator discovers it at every save and load; `sharing.py` applies patterns to it.
"""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch.distributed
from torch.distributed import ProcessGroup

from forgather.ml.checkpoint.all_ranks import on_every_rank
from forgather.ml.checkpoint.errors import CheckpointError
from forgather.ml.distributed import DistributedEnvInterface, Peers

Ranks = tuple[int, ...]

StorageScope = Literal["job", "node", "rank"]
"""Ranks that share one output directory: all ranks of the job, the ranks of a node, or a single rank."""


@dataclass(frozen=True)
class _Place:
    """Location of one rank, as sent to the other ranks."""

    local_rank: int
    host: str
    groups: dict[str, Ranks]


@dataclass(frozen=True)
class RankLayout:
    """Groups, nodes and storages of all ranks. Equal on every rank except for `rank`.

    Groups, nodes and storages are numbered in the order of their lowest ranks.
    """

    rank: int
    nodes: tuple[Ranks, ...]
    families: Mapping[str, tuple[Ranks, ...]]
    storages: tuple[Ranks, ...]
    """Ranks of each checkpoint directory; its leader comes first."""
    hosts: tuple[str, ...]

    @property
    def world_size(self) -> int:
        return len(self.hosts)

    @property
    def everyone(self) -> Ranks:
        return tuple(range(self.world_size))

    @property
    def storage(self) -> Ranks:
        """Ranks that share this rank's checkpoint directory."""
        return next(ranks for ranks in self.storages if self.rank in ranks)

    @property
    def leads_storage(self) -> bool:
        return self.storage[0] == self.rank

    @classmethod
    def discover(
        cls,
        peers: Peers,
        env: DistributedEnvInterface,
        process_groups: Mapping[str, ProcessGroup | None],
        storage_scope: StorageScope = "job",
        leader_local_rank: int = 0,
    ) -> "RankLayout":
        """Gather the locations of all ranks and return the layout. Collective.

        `storage_scope` is "job" if all ranks share one directory, "node" or "rank" if each node or rank has its own.
        """

        def describe() -> _Place:
            groups = {name: _members(group, peers.rank) for name, group in process_groups.items()}
            return _Place(env.local_rank, socket.gethostname(), groups)

        places = on_every_rank(peers, describe, "gathering the layout of ranks", CheckpointError)
        local_ranks = [place.local_rank for place in places]
        nodes = _nodes(local_ranks)
        # Families of all ranks, so that a family missing on one rank raises the same error everywhere.
        names = sorted({name for place in places for name in place.groups})
        return cls(
            rank=peers.rank,
            nodes=nodes,
            families={name: _partition(name, [place.groups.get(name) for place in places]) for name in names},
            storages=_storages(storage_scope, nodes, local_ranks, leader_local_rank),
            hosts=tuple(place.host for place in places),
        )


def _members(group: ProcessGroup | None, rank: int) -> Ranks:
    # Without a process group, every rank is a group with one member.
    if group is None or not torch.distributed.is_initialized():
        return (rank,)
    return tuple(sorted(torch.distributed.get_process_group_ranks(group)))


def _nodes(local_ranks: Sequence[int]) -> tuple[Ranks, ...]:
    """Return the ranks of each node. They are consecutive and start with local rank 0; nodes may differ in size."""
    nodes: list[list[int]] = []
    for rank, local_rank in enumerate(local_ranks):
        if local_rank == 0 or not nodes:
            nodes.append([])
        nodes[-1].append(rank)
    return tuple(tuple(ranks) for ranks in nodes)


def _partition(family: str, memberships: Sequence[Ranks | None]) -> tuple[Ranks, ...]:
    """Return the groups of a family. Raise `ValueError` unless every rank is in exactly one of them."""
    groups = sorted({ranks for ranks in memberships if ranks is not None})
    # All members must name the same group, or two groups would claim the same rank's state.
    for rank, ranks in enumerate(memberships):
        if ranks is None or rank not in ranks or any(memberships[member] != ranks for member in ranks):
            raise ValueError(
                f"The process groups named {family!r} do not partition the ranks: rank {rank} passes the group {ranks}. "
                "Every rank must pass the group of that family that contains it."
            )
    return tuple(groups)


def _storages(
    scope: StorageScope, nodes: Sequence[Ranks], local_ranks: Sequence[int], leader_local_rank: int
) -> tuple[Ranks, ...]:
    everyone = [rank for ranks in nodes for rank in ranks]
    if scope == "rank":
        return tuple((rank,) for rank in everyone)
    if scope == "job":
        return (tuple(everyone),)
    storages = []
    for ranks in nodes:
        leader = next((rank for rank in ranks if local_ranks[rank] == leader_local_rank), None)
        if leader is None:
            raise ValueError(
                f"save_on_local_rank={leader_local_rank}, but the node of ranks {list(ranks)} has only local ranks 0 to "
                f"{len(ranks) - 1}."
            )
        storages.append((leader, *(rank for rank in ranks if rank != leader)))
    return tuple(storages)


def ranks_text(ranks: Sequence[int]) -> str:
    """Format ranks for a message: "rank 0", "ranks 0, 1"."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
