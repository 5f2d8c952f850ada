"""Which ranks share what: groups, nodes and storage, as every rank of the job sees them."""

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
"""Who sees one output directory: all ranks, the ranks of a node, or each rank alone."""


@dataclass(frozen=True)
class _Place:
    """What a rank tells the others about where it is."""

    local_rank: int
    host: str
    groups: dict[str, Ranks]


@dataclass(frozen=True)
class RankLayout:
    """The same on every rank but for `rank`; groups, nodes and storages are numbered by their lowest rank."""

    rank: int
    nodes: tuple[Ranks, ...]
    families: Mapping[str, tuple[Ranks, ...]]
    storages: tuple[Ranks, ...]
    """The ranks that see one checkpoint directory; its leader comes first."""
    hosts: tuple[str, ...]

    @property
    def world_size(self) -> int:
        return len(self.hosts)

    @property
    def everyone(self) -> Ranks:
        return tuple(range(self.world_size))

    @property
    def storage(self) -> Ranks:
        """The ranks that share this rank's checkpoint directory."""
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
        """Collective: every rank tells where it is.

        `storage_scope`: "job" when all ranks see one directory, "node" or "rank" when each of those has its own.
        """

        def describe() -> _Place:
            groups = {name: _members(group, peers.rank) for name, group in process_groups.items()}
            return _Place(env.local_rank, socket.gethostname(), groups)

        places = on_every_rank(peers, describe, "finding out how ranks are grouped", CheckpointError)
        local_ranks = [place.local_rank for place in places]
        nodes = _nodes(local_ranks)
        # Of all ranks, not only of this one: a family that one rank lacks is an error everywhere.
        names = sorted({name for place in places for name in place.groups})
        return cls(
            rank=peers.rank,
            nodes=nodes,
            families={name: _partition(name, [place.groups.get(name) for place in places]) for name in names},
            storages=_storages(storage_scope, nodes, local_ranks, leader_local_rank),
            hosts=tuple(place.host for place in places),
        )


def _members(group: ProcessGroup | None, rank: int) -> Ranks:
    if group is None or not torch.distributed.is_initialized():
        return (rank,)
    return tuple(sorted(torch.distributed.get_process_group_ranks(group)))


def _nodes(local_ranks: Sequence[int]) -> tuple[Ranks, ...]:
    """The ranks of a node are consecutive and begin with local rank 0; nodes may differ in size."""
    nodes: list[list[int]] = []
    for rank, local_rank in enumerate(local_ranks):
        if local_rank == 0 or not nodes:
            nodes.append([])
        nodes[-1].append(rank)
    return tuple(tuple(ranks) for ranks in nodes)


def _partition(family: str, memberships: Sequence[Ranks | None]) -> tuple[Ranks, ...]:
    groups = sorted({ranks for ranks in memberships if ranks is not None})
    for rank, ranks in enumerate(memberships):
        if ranks is None or rank not in ranks or any(memberships[member] != ranks for member in ranks):
            raise ValueError(
                f"The process groups named {family!r} do not divide the ranks: rank {rank} says its group is {ranks}. "
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
                f"save_on_local_rank={leader_local_rank}, but the node of ranks {list(ranks)} has local ranks 0 to "
                f"{len(ranks) - 1} only."
            )
        storages.append((leader, *(rank for rank in ranks if rank != leader)))
    return tuple(storages)


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks in a message: "rank 0", "ranks 0, 1"."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
