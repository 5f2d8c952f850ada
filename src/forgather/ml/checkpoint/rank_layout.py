"""Layout of ranks: the process groups, nodes and storages that ranks share.

Every rank gathers the same layout, so that all ranks derive the same plan of writers and readers without further
communication. The coordinator discovers it at every save and load; `sharing.py` applies patterns to it.
"""

import array
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch.distributed
import xxhash
from torch.distributed import ProcessGroup

from forgather.ml.checkpoint.all_ranks import on_every_rank
from forgather.ml.checkpoint.errors import CheckpointError
from forgather.ml.distributed import DistributedEnvInterface, Peers

Ranks = tuple[int, ...]

StorageScope = Literal["job", "node", "rank"]
"""Ranks that share one output directory: all ranks of the job, the ranks of a node, or a single rank."""


class Membership(NamedTuple):
    """Group of one rank, as sent to the other ranks.

    Only the first member lists the ranks. With a list from each rank, a gather would grow with the square of the ranks.
    """

    first: int
    digest: str
    ranks: Ranks | None

    @classmethod
    def of(cls, ranks: Ranks, rank: int) -> "Membership":
        digest = xxhash.xxh3_128_hexdigest(array.array("q", ranks).tobytes())
        return cls(ranks[0], digest, ranks if ranks[0] == rank else None)


class _Place(NamedTuple):
    """Location of one rank, as sent to the other ranks."""

    local_rank: int
    host: str
    groups: dict[str, Membership]


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

    @cached_property
    def everyone(self) -> Ranks:
        return tuple(range(self.world_size))

    @cached_property
    def storage_of(self) -> Mapping[int, int]:
        """Index in `storages` of each rank's checkpoint directory."""
        return {rank: number for number, ranks in enumerate(self.storages) for rank in ranks}

    @property
    def storage(self) -> Ranks:
        """Ranks that share this rank's checkpoint directory."""
        return self.storages[self.storage_of[self.rank]]

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

        own: dict[str, Ranks] = {}

        def describe() -> _Place:
            own.update({name: _members(group, peers.rank) for name, group in process_groups.items()})
            groups = {name: Membership.of(ranks, peers.rank) for name, ranks in own.items()}
            return _Place(env.local_rank, socket.gethostname(), groups)

        places = on_every_rank(peers, describe, "gathering the layout of ranks", CheckpointError)
        local_ranks = [place.local_rank for place in places]
        nodes = _nodes(local_ranks)
        # Families of all ranks, so that a family missing on one rank raises the same error everywhere.
        names = sorted({name for place in places for name in place.groups})
        families = {name: partition([place.groups.get(name) for place in places]) for name in names}
        for name in names:
            if families[name] is None:
                # Every rank sees the same memberships, so all ranks reach this gather or none.
                raise _misfit(name, peers.gather(own.get(name), "describing process groups"))
        return cls(
            rank=peers.rank,
            nodes=nodes,
            families={name: groups for name, groups in families.items() if groups is not None},
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


def partition(memberships: Sequence[Membership | None]) -> tuple[Ranks, ...] | None:
    """Return the groups of a family; None unless every rank is in exactly one group, and its members agree."""
    groups: list[Ranks] = []
    for rank, own in enumerate(memberships):
        first = None if own is None else memberships[own.first]
        # All members must name the same group, or two groups would claim the same rank's state.
        if own is None or first is None or (first.first, first.digest) != (own.first, own.digest):
            return None
        if own.first == rank:
            assert own.ranks is not None, "the first member lists the ranks"
            groups.append(own.ranks)
    group_of = {rank: ranks[0] for ranks in groups for rank in ranks}
    # A rank in two groups makes the groups larger than the job. A rank outside its own group is in another, or in none.
    is_partition = sum(map(len, groups)) == len(memberships)
    if not is_partition or any(own is None or group_of.get(rank) != own.first for rank, own in enumerate(memberships)):
        return None
    return tuple(sorted(groups))


def _misfit(family: str, memberships: Sequence[Ranks | None]) -> ValueError:
    """Return the error about the lowest rank in a wrong group."""
    rank = first_misfit(memberships)
    return ValueError(
        f"The process groups named {family!r} do not partition the ranks: rank {rank} passes the group "
        f"{memberships[rank]}. Every rank must pass the group of that family that contains it."
    )


def first_misfit(memberships: Sequence[Ranks | None]) -> int:
    """Return the lowest rank without a group, outside its group, or in a group with a member that names another."""
    numbers: dict[Ranks | None, int] = {}
    named = [numbers.setdefault(ranks, len(numbers)) for ranks in memberships]
    is_agreed = {
        number: ranks is not None and all(named[member] == number for member in ranks)
        for ranks, number in numbers.items()
    }
    return next(
        rank
        for rank, ranks in enumerate(memberships)
        if ranks is None or rank not in ranks or not is_agreed[named[rank]]
    )


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
