"""Sharing patterns applied to a layout of ranks: the ranks that own, hold and write each copy, and its file name.

Every save checks that copies of a component have the same tensor names on all ranks, because only one copy is written.
Snapshots, the weight planner and the reader use it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from forgather.ml.checkpoint.components import SharingPattern, StateComponent
from forgather.ml.checkpoint.encoding.digest import combine_digests, leaves_by_path
from forgather.ml.checkpoint.errors import CheckpointSaveError
from forgather.ml.checkpoint.rank_layout import RankLayout, Ranks, ranks_text
from forgather.ml.distributed import Peers

Declaration = tuple[str, str, str | None]
"""Key, pattern and group family of a component with copies."""

_NUM_SHOWN = 3


@dataclass(frozen=True)
class Owner:
    """Ranks that share one copy of a component. `number` distinguishes its copies; None if there is only one."""

    number: int | None
    ranks: Ranks

    @property
    def ranks_of_file(self) -> list[int]:
        """Ranks as listed in the manifest: an empty list means all ranks."""
        # Not the list of all ranks, because a GLOBAL or REPLICATED file also serves jobs with another world size.
        return [] if self.number is None else list(self.ranks)


@dataclass(frozen=True)
class ComponentSharing:
    """Sharing of one component between the ranks of this job."""

    component: StateComponent
    layout: RankLayout

    @cached_property
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

    @cached_property
    def _owner_of(self) -> dict[int, Owner]:
        return {rank: owner for owner in self.owners for rank in owner.ranks}

    @property
    def own(self) -> Owner:
        """Copy of this rank."""
        return self._owner_of[self.layout.rank]

    @property
    def is_held_here(self) -> bool:
        """Whether this rank's object supplies the state at a save. Other ranks only receive it at a load."""
        return not self._has_one_holder or self.own.ranks[0] == self.layout.rank

    @property
    def is_described_here(self) -> bool:
        """Whether this rank describes its copy to the other ranks, on behalf of all holders of that copy."""
        return self.own.ranks[0] == self.layout.rank

    @property
    def _has_one_holder(self) -> bool:
        # With these patterns only the first rank has to hold current state, so other ranks are not asked for it.
        return self.component.sharing_pattern in (SharingPattern.GLOBAL, SharingPattern.PER_NODE)

    def holders(self, owner: Owner) -> Ranks:
        """Return the ranks that can supply this copy at a save."""
        return owner.ranks[:1] if self._has_one_holder else owner.ranks

    def owners_in(self, storage: Ranks) -> list[Owner]:
        """Return the copies that a checkpoint directory needs, because its ranks will read them."""
        needed = {self._owner_of[rank].number for rank in storage}
        # Copies are numbered by their position in `owners`. A single copy has no number.
        return [self.owners[position] for position in sorted(number or 0 for number in needed)]

    def _writers(self, storage: Ranks) -> dict[int | None, int]:
        """Return the rank that writes each copy into a directory: the first holder there, or else its leader."""
        writers: dict[int | None, int] = {}
        for rank in storage:
            owner = self._owner_of[rank]
            # GLOBAL and PER_NODE state has one holder, the first rank of its owner.
            if not self._has_one_holder or owner.ranks[0] == rank:
                writers.setdefault(owner.number, rank)
        return {owner.number: writers.get(owner.number, storage[0]) for owner in self.owners_in(storage)}

    def written_here(self) -> list[Owner]:
        """Return the copies that this rank writes."""
        storage = self.layout.storage
        writers = self._writers(storage)
        return [owner for owner in self.owners_in(storage) if writers[owner.number] == self.layout.rank]

    def is_relayed(self, owner: Owner) -> bool:
        """Return whether a directory needs this copy although none of its ranks holds it."""
        # Computed from the layout alone, so that all ranks agree without communication.
        storage_of = self.layout.storage_of
        supplied = {storage_of[rank] for rank in self.holders(owner)}
        return any(storage_of[rank] not in supplied for rank in owner.ranks)

    def file_name(self, owner: Owner) -> str:
        # Part of the checkpoint format: `foreign/ownership.py` recognises these names too.
        key, pattern = self.component.key, self.component.sharing_pattern
        if pattern is SharingPattern.PER_RANK:
            return f"{key}_state_rank_{owner.number}.pt"
        if pattern is SharingPattern.PER_GROUP:
            return f"{key}_state_group_{self.component.process_group_name}_{owner.number}.pt"
        if pattern is SharingPattern.PER_NODE:
            return f"{key}_state_node_{owner.number}.pt"
        return f"{key}_state.pt"


def has_copies(component: StateComponent) -> bool:
    """Return whether the pattern declares identical copies on several ranks."""
    return component.sharing_pattern in (SharingPattern.REPLICATED, SharingPattern.PER_GROUP)


def declaration_of(component: StateComponent) -> Declaration:
    return component.key, component.sharing_pattern.value, component.process_group_name


def tensor_names(state: object) -> list[str]:
    """Return the paths of the tensors in a state. Their contents are not read."""
    return [path for path, leaf in leaves_by_path(state).items() if isinstance(leaf, Tensor)]


def names_digest(state: object) -> str:
    return combine_digests(dict.fromkeys(tensor_names(state), ""))


def check_names(
    sharings: Sequence[ComponentSharing],
    states: Mapping[str, object],
    digests: Sequence[Mapping[Declaration, str]],
    peers: Peers,
) -> None:
    """Raise on every rank if copies of a component have different tensor names.

    `digests` are the gathered digests of all ranks. The names themselves are exchanged only if digests differ.
    """
    # Every rank sees the same digests and so takes the same branch: either all ranks reach the gather below or none.
    _check_declarations(digests)
    for sharing in sharings:
        declared = declaration_of(sharing.component)
        for owner in sharing.owners:
            if len({digests[rank][declared] for rank in owner.ranks}) > 1:
                names = peers.gather(tensor_names(states[sharing.component.key]), "comparing the names of tensors")
                raise CheckpointSaveError(_describe_difference(sharing.component, owner, names))


def _check_declarations(digests: Sequence[Mapping[Declaration, str]]) -> None:
    """Raise `CheckpointSaveError` if ranks declare a shared component differently, or only some ranks declare it."""
    # Sorted by `repr`, because None and text do not compare; in this order all ranks report the same component.
    for declared in sorted({one for held in digests for one in held}, key=repr):
        without = [rank for rank, held in enumerate(digests) if declared not in held]
        if without:
            key, pattern, family = declared
            raise CheckpointSaveError(
                f"Component {key!r} is declared {_pattern_text(pattern, family)} by some ranks, but not by "
                f"{ranks_text(without)}. get_state_components() must declare shared components identically on all ranks."
            )


def _describe_difference(component: StateComponent, owner: Owner, names: Sequence[Sequence[str]]) -> str:
    holders: dict[str, list[int]] = {}
    for rank in owner.ranks:
        for name in names[rank]:
            holders.setdefault(name, []).append(rank)
    partial = {name: ranks for name, ranks in holders.items() if len(ranks) < len(owner.ranks)}
    shown = [f"{name} only on {ranks_text(ranks)}" for name, ranks in _first_of_each(partial)]
    pattern = _pattern_text(component.sharing_pattern.value, component.process_group_name)
    return (
        f"Component {component.key!r} is declared {pattern}: {ranks_text(owner.ranks)} must have the same tensors. But "
        f"{len(partial)} tensors are not on all of them: {'; '.join(shown)}. Only one copy is written, so the other tensors "
        "would be lost. Declare it PER_RANK if ranks have different tensors, or PER_GROUP over the process groups that "
        "share tensors (for pipeline stages: the data-parallel groups)."
    )


def _first_of_each(partial: Mapping[str, list[int]]) -> list[tuple[str, list[int]]]:
    """Return a few examples: first one tensor for each distinct set of ranks, then further tensors."""
    first = {tuple(ranks): name for name, ranks in reversed(list(partial.items()))}
    chosen = set(first.values())
    ordered = sorted(partial.items(), key=lambda item: item[0] not in chosen)
    return ordered[: max(_NUM_SHOWN, min(len(chosen), 2 * _NUM_SHOWN))]


def _pattern_text(pattern: str, family: str | None) -> str:
    return pattern.upper() if family is None else f"{pattern.upper()} over {family!r}"
