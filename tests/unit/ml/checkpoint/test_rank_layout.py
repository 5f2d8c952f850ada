"""Layouts of many ranks: the same groups, writers and errors as a slow reference, in linear time."""

import itertools
import random
from collections.abc import Sequence

import pytest
import torch.distributed as dist

from forgather.ml.checkpoint.components import SharingPattern, StateComponent
from forgather.ml.checkpoint.rank_layout import Membership, RankLayout, Ranks, first_misfit, partition
from forgather.ml.checkpoint.sharing import ComponentSharing, Owner
from forgather.ml.distributed import Peers, StaticDistributedEnvironment
from tests.support.ranks import outcomes_on_ranks

# --- slow references: the definitions, word for word


def slow_misfit(memberships: Sequence[Ranks | None]) -> int | None:
    for rank, ranks in enumerate(memberships):
        if ranks is None or rank not in ranks or any(memberships[member] != ranks for member in ranks):
            return rank
    return None


def slow_owners_in(sharing: ComponentSharing, storage: Ranks) -> list[Owner]:
    return [owner for owner in sharing.owners if set(owner.ranks) & set(storage)]


def slow_writer(sharing: ComponentSharing, owner: Owner, storage: Ranks) -> int:
    return next((rank for rank in storage if rank in sharing.holders(owner)), storage[0])


def slow_is_relayed(sharing: ComponentSharing, owner: Owner) -> bool:
    storages = [storage for storage in sharing.layout.storages if set(owner.ranks) & set(storage)]
    return any(not set(sharing.holders(owner)) & set(storage) for storage in storages)


# --- random layouts


def random_partition(generator: random.Random, num_ranks: int) -> list[Ranks]:
    ranks = list(range(num_ranks))
    generator.shuffle(ranks)
    cuts = sorted(generator.sample(range(1, num_ranks), generator.randint(0, num_ranks - 1)))
    bounds = [0, *cuts, num_ranks]
    return sorted(tuple(sorted(ranks[start:end])) for start, end in itertools.pairwise(bounds))


def consecutive(groups: Sequence[Ranks]) -> list[Ranks]:
    """Nodes of the same sizes, with consecutive ranks."""
    starts = [sum(map(len, groups[:number])) for number in range(len(groups))]
    return [tuple(range(start, start + len(ranks))) for start, ranks in zip(starts, groups, strict=True)]


def memberships_of(groups: Sequence[Ranks], num_ranks: int) -> list[Ranks | None]:
    group_of = {rank: ranks for ranks in groups for rank in ranks}
    return [group_of.get(rank) for rank in range(num_ranks)]


def damaged(generator: random.Random, memberships: list[Ranks | None]) -> list[Ranks | None]:
    """Give one rank another group: no group, a neighbour's, or an unknown group."""
    num_ranks = len(memberships)
    rank = generator.randrange(num_ranks)
    unknown = tuple(sorted({rank, *generator.sample(range(num_ranks), generator.randint(1, num_ranks))}))
    wrong = generator.choice([None, memberships[generator.randrange(num_ranks)], unknown])
    return [wrong if number == rank else ranks for number, ranks in enumerate(memberships)]


def told(memberships: Sequence[Ranks | None]) -> list[Membership | None]:
    return [None if ranks is None else Membership.of(ranks, rank) for rank, ranks in enumerate(memberships)]


def random_layout(generator: random.Random) -> RankLayout:
    num_ranks = generator.randint(2, 9)
    nodes = consecutive(random_partition(generator, num_ranks))
    leaders = [generator.choice(ranks) for ranks in nodes]
    scattered = [
        (leader, *(rank for rank in ranks if rank != leader)) for leader, ranks in zip(leaders, nodes, strict=True)
    ]
    everyone = tuple(range(num_ranks))
    return RankLayout(
        rank=generator.randrange(num_ranks),
        nodes=tuple(nodes),
        families={"group": tuple(random_partition(generator, num_ranks))},
        storages=generator.choice([(everyone,), tuple(scattered), tuple((rank,) for rank in everyone)]),
        hosts=("host",) * num_ranks,
    )


def test_partitions_match_the_definition() -> None:
    generator = random.Random(0)
    num_wrong = 0
    for _ in range(2000):
        num_ranks = generator.randint(2, 7)
        memberships = memberships_of(random_partition(generator, num_ranks), num_ranks)
        if generator.random() < 0.7:
            memberships = damaged(generator, memberships)
        misfit = slow_misfit(memberships)
        found = partition(told(memberships))
        if misfit is None:
            assert found == tuple(sorted({ranks for ranks in memberships if ranks is not None})), memberships
        else:
            assert found is None and first_misfit(memberships) == misfit, memberships
            num_wrong += 1
    assert num_wrong > 500


@pytest.mark.parametrize("pattern", list(SharingPattern))
def test_writers_and_readers_match_the_definition(pattern: SharingPattern) -> None:
    generator = random.Random(1)
    group = "group" if pattern is SharingPattern.PER_GROUP else None
    for _ in range(300):
        layout = random_layout(generator)
        sharing = ComponentSharing(StateComponent("key", object(), pattern, process_group_name=group), layout)
        for storage in layout.storages:
            assert sharing.owners_in(storage) == slow_owners_in(sharing, storage)
        here = [storage for storage in layout.storages if layout.rank in storage]
        assert [layout.storage] == here
        assert sharing.written_here() == [
            owner
            for owner in slow_owners_in(sharing, layout.storage)
            if slow_writer(sharing, owner, layout.storage) == layout.rank
        ]
        for owner in sharing.owners:
            assert sharing.is_relayed(owner) == slow_is_relayed(sharing, owner)
        assert layout.rank in sharing.own.ranks
        assert sharing.is_held_here == (layout.rank in sharing.holders(sharing.own))


def test_only_first_members_list_their_group() -> None:
    num_ranks, size = 4096, 512
    groups = [tuple(range(first, num_ranks, num_ranks // size)) for first in range(num_ranks // size)]
    sent = told(memberships_of(groups, num_ranks))
    assert sum(len(one.ranks) for one in sent if one is not None and one.ranks is not None) == num_ranks
    assert partition(sent) == tuple(groups)


@pytest.mark.parametrize("pattern", list(SharingPattern))
def test_layout_of_four_thousand_ranks_has_the_right_writers(pattern: SharingPattern) -> None:
    num_ranks = 4096
    nodes = tuple(tuple(range(first, first + 8)) for first in range(0, num_ranks, 8))
    for storages in ((tuple(range(num_ranks)),), nodes, tuple((rank,) for rank in range(num_ranks))):
        layout = RankLayout(0, nodes, {"group": nodes}, storages, ("host",) * num_ranks)
        group = "group" if pattern is SharingPattern.PER_GROUP else None
        sharing = ComponentSharing(StateComponent("key", object(), pattern, process_group_name=group), layout)
        assert sum(len(sharing.owners_in(storage)) for storage in storages) >= len(sharing.owners)
        assert sharing.written_here()[0] == sharing.owners[0]
        # Only state with one holder has to be sent to other directories.
        has_one_holder = pattern in (SharingPattern.GLOBAL, SharingPattern.PER_NODE)
        spans_storages = len(sharing.owners[-1].ranks) > len(storages[-1])
        assert sharing.is_relayed(sharing.owners[-1]) == (has_one_holder and spans_storages)


# --- on ranks


def discover_wrong_groups() -> None:
    pair = dist.new_group([0, 1])
    # Rank 1 passes another group than rank 0, which names both of them.
    groups = {"pairs": pair if dist.get_rank() == 0 else None}
    RankLayout.discover(Peers.world(), StaticDistributedEnvironment(local_rank=dist.get_rank()), groups)


def test_groups_that_do_not_partition_the_ranks_are_rejected_on_all_ranks() -> None:
    expected = "'pairs' do not partition the ranks: rank 0 passes the group (0, 1)"
    for outcome in outcomes_on_ranks(discover_wrong_groups, 2):
        assert expected in str(outcome), outcome
