"""What a sharing pattern means on a given layout of ranks: who owns, holds, writes and names each copy."""

from dataclasses import dataclass

from forgather.ml.checkpoint.components import SharingPattern, StateComponent
from forgather.ml.checkpoint.rank_layout import RankLayout, Ranks


@dataclass(frozen=True)
class Owner:
    """The ranks that share one copy of a component; `number` tells the copies of a component apart."""

    number: int | None
    ranks: Ranks

    @property
    def ranks_of_file(self) -> list[int]:
        """As the manifest lists them: nothing stands for all ranks."""
        return [] if self.number is None else list(self.ranks)


@dataclass(frozen=True)
class ComponentSharing:
    """A component on the ranks of this job."""

    component: StateComponent
    layout: RankLayout

    @property
    def owners(self) -> list[Owner]:
        pattern, layout = self.component.sharing_pattern, self.layout
        if pattern is SharingPattern.PER_RANK:
            return [Owner(rank, (rank,)) for rank in layout.everyone]
        if pattern is SharingPattern.PER_GROUP:
            assert self.component.process_group_name is not None
            groups = layout.families[self.component.process_group_name]
            return [Owner(number, ranks) for number, ranks in enumerate(groups)]
        if pattern is SharingPattern.PER_NODE:
            return [Owner(number, ranks) for number, ranks in enumerate(layout.nodes)]
        return [Owner(None, layout.everyone)]

    @property
    def own(self) -> Owner:
        """The copy of this rank."""
        return next(owner for owner in self.owners if self.layout.rank in owner.ranks)

    @property
    def is_held_here(self) -> bool:
        """Whether this rank's object has the state, and is not only given it on loading."""
        return self.layout.rank in self.holders(self.own)

    def holders(self, owner: Owner) -> Ranks:
        if self.component.sharing_pattern in (SharingPattern.GLOBAL, SharingPattern.PER_NODE):
            return owner.ranks[:1]
        return owner.ranks

    def owners_in(self, storage: Ranks) -> list[Owner]:
        """The copies that the ranks of a checkpoint directory will want to read from it."""
        return [owner for owner in self.owners if set(owner.ranks) & set(storage)]

    def writer(self, owner: Owner, storage: Ranks) -> int:
        """The rank that writes this copy into that directory: one that has it, else the directory's leader."""
        return next((rank for rank in storage if rank in self.holders(owner)), storage[0])

    def written_here(self) -> list[Owner]:
        """The copies that this rank writes."""
        storage = self.layout.storage
        return [owner for owner in self.owners_in(storage) if self.writer(owner, storage) == self.layout.rank]

    def is_relayed(self, owner: Owner) -> bool:
        """Whether some directory needs this copy but none of its ranks holds it."""
        storages = [storage for storage in self.layout.storages if set(owner.ranks) & set(storage)]
        return any(not set(self.holders(owner)) & set(storage) for storage in storages)

    def file_name(self, owner: Owner) -> str:
        key, pattern = self.component.key, self.component.sharing_pattern
        if pattern is SharingPattern.PER_RANK:
            return f"{key}_state_rank_{owner.number}.pt"
        if pattern is SharingPattern.PER_GROUP:
            return f"{key}_state_group_{self.component.process_group_name}_{owner.number}.pt"
        if pattern is SharingPattern.PER_NODE:
            return f"{key}_state_node_{owner.number}.pt"
        return f"{key}_state.pt"
