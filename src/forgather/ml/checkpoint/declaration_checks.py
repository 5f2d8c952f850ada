"""Declarations, checked at every save before anything is written: what they promise must be what ranks have and write."""

import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from forgather.ml.checkpoint.components import SharingPattern, StateComponent
from forgather.ml.checkpoint.encoding.digest import combine_digests, leaves_by_path
from forgather.ml.checkpoint.errors import CheckpointSaveError
from forgather.ml.checkpoint.rank_layout import Ranks
from forgather.ml.checkpoint.sharing import ComponentSharing, Owner
from forgather.ml.checkpoint.weights.hf_files import CONFIG_FILES
from forgather.ml.checkpoint.weights.location import abbreviate
from forgather.ml.checkpoint.weights.safetensors_io import SharingMetadataT
from forgather.ml.distributed import Peers

logger = logging.getLogger(__name__)

Declaration = tuple[str, str, str | None]
"""Key, pattern and family of a component whose copies are to have the same tensors."""

_NUM_SHOWN = 3


# --- the names of copies


def has_copies(component: StateComponent) -> bool:
    """Whether a pattern says of several ranks that each of them has the same."""
    return component.sharing_pattern in (SharingPattern.REPLICATED, SharingPattern.PER_GROUP)


def declaration_of(component: StateComponent) -> Declaration:
    return component.key, component.sharing_pattern.value, component.process_group_name


def tensor_names(state: object) -> list[str]:
    """The paths of the tensors in a state; their contents are not looked at."""
    return [path for path, leaf in leaves_by_path(state).items() if isinstance(leaf, Tensor)]


def names_digest(state: object) -> str:
    return combine_digests(dict.fromkeys(tensor_names(state), ""))


def check_names(
    sharings: Sequence[ComponentSharing],
    states: Mapping[str, object],
    digests: Sequence[Mapping[Declaration, str]],
    peers: Peers,
) -> None:
    """Raise on every rank when copies of a component differ in the names of their tensors.

    `digests` are those of all ranks, so that all of them come to the same decision. Only when there is a difference
    are the names themselves exchanged.
    """
    _check_declarations(digests)
    for sharing in sharings:
        declared = declaration_of(sharing.component)
        for owner in sharing.owners:
            if len({digests[rank][declared] for rank in owner.ranks}) > 1:
                names = peers.gather(tensor_names(states[sharing.component.key]), "comparing the names of tensors")
                raise CheckpointSaveError(_describe_difference(sharing.component, owner, names))


def _check_declarations(digests: Sequence[Mapping[Declaration, str]]) -> None:
    """A component that only some ranks declare, or that they declare differently, has no copies to compare."""
    for declared in sorted({one for held in digests for one in held}, key=repr):
        without = [rank for rank, held in enumerate(digests) if declared not in held]
        if without:
            key, pattern, family = declared
            raise CheckpointSaveError(
                f"Component {key!r} is declared {_pattern_text(pattern, family)} by some ranks, but not by "
                f"{ranks_text(without)}. get_state_components() must declare a component that ranks share in the same way "
                "on all of them."
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
        f"Component {component.key!r} is declared {pattern}: {ranks_text(owner.ranks)} have copies of the same tensors. But "
        f"{len(partial)} tensors are not on all of them: {'; '.join(shown)}. One copy is written, so the others would be "
        "lost. Declare it PER_RANK when each rank has tensors of its own, or PER_GROUP over the process groups whose ranks "
        "have the same ones (for the stages of a pipeline: those of data parallelism)."
    )


def _first_of_each(partial: Mapping[str, list[int]]) -> list[tuple[str, list[int]]]:
    """One tensor for every set of ranks, then others, so that a reader sees who has what."""
    first = {tuple(ranks): name for name, ranks in reversed(list(partial.items()))}
    chosen = set(first.values())
    ordered = sorted(partial.items(), key=lambda item: item[0] not in chosen)
    return ordered[: max(_NUM_SHOWN, min(len(chosen), 2 * _NUM_SHOWN))]


# --- the files of the weights


@dataclass(frozen=True)
class WeightPlan:
    """What a rank is going to write of the model; the leader of a directory also tells what will be said of it."""

    files: Sequence[tuple[str, Sequence[str]]]
    """Each file with its tensors."""
    weight_map: Mapping[str, str] = field(default_factory=dict)
    """The leader's: which file is to have which tensor."""
    tied: SharingMetadataT = field(default_factory=list)
    """The leader's: names that are one tensor, of which one is stored."""
    expected_by: str = ""
    """The leader's: the class that `from_pretrained` will build."""
    missing: Sequence[str] = ()
    """The leader's: what that class will look for in vain."""


def check_coverage(plans: Sequence[WeightPlan], storages: Sequence[Ranks], held: Sequence[Iterable[str]]) -> None:
    """Raise on every rank unless the files that are going to be written are those of the index, tensor by tensor.

    `plans` are those of all ranks; `held` are the tensors that the model has in each of the storages.
    """
    for storage, names in zip(storages, held, strict=True):
        _check_writers(plans, storage)
        _check_places(plans[storage[0]], names)
        _check_index(plans, storage)


def written_files(plans: Sequence[WeightPlan], storage: Ranks) -> dict[str, list[str]]:
    """The tensors of each weight file of a directory, whoever writes it."""
    return {file: list(names) for rank in storage for file, names in plans[rank].files}


def _check_writers(plans: Sequence[WeightPlan], storage: Ranks) -> None:
    writers: dict[str, list[int]] = {}
    for rank in storage:
        for file, _ in plans[rank].files:
            writers.setdefault(file, []).append(rank)
    for file, ranks in writers.items():
        if len(ranks) > 1:
            raise CheckpointSaveError(
                f"The shard index of component 'model' puts tensors of different ranks into {file}: {ranks_text(ranks)} "
                "would all write it. Give make_shard_index one state dict for each part of the model."
            )


def _check_places(leader: WeightPlan, held: Iterable[str]) -> None:
    stored = set(leader.weight_map)
    covered = stored.union(*(group for group in leader.tied if stored & set(group)))
    lost = [name for name in held if name not in covered]
    if lost:
        raise CheckpointSaveError(
            f"The shard index has no file for {len(lost)} tensors of component 'model': {abbreviate(lost, _NUM_SHOWN)}. "
            "Make the index from the model as it is now, or pass none."
        )


def _check_index(plans: Sequence[WeightPlan], storage: Ranks) -> None:
    """An index and what is written say the same, unless it is of another model, or ranks were given different ones."""
    weight_map = plans[storage[0]].weight_map
    written = {(name, file): rank for rank in storage for file, names in plans[rank].files for name in names}
    files = {file for _, file in written}
    unwritten = [(name, file) for name, file in weight_map.items() if (name, file) not in written]
    if unwritten:
        name, file = unwritten[0]
        what = f"tensor {name} in it" if file in files else f"that file, nor tensor {name} in it"
        raise CheckpointSaveError(
            f"The shard index of component 'model' lists {len(unwritten)} tensors that nobody writes: {file} is to have "
            f"{abbreviate([one for one, place in unwritten if place == file], _NUM_SHOWN)}, but none of "
            f"{ranks_text(storage)} writes {what}. The checkpoint could not be loaded. Make the index from the model as it "
            "is now, or pass none."
        )
    for (name, file), rank in written.items():
        if weight_map.get(name) != file:
            raise CheckpointSaveError(
                f"Component 'model': rank {rank} would write tensor {name} into {file}, where the shard index of rank "
                f"{storage[0]} does not have it. Give all ranks the same shard_index, or none."
            )


# --- what from_pretrained will find


def refuse_incomplete_export(plans: Sequence[WeightPlan], storages: Sequence[Ranks]) -> None:
    """Raise on every rank when `from_pretrained` would fill a part of the exported model with fresh weights."""
    on_nodes = (
        " Directories of single nodes or ranks have their own stages only: export to storage that all ranks share."
    )
    for plan in plans:
        if plan.missing:
            raise CheckpointSaveError(
                f"The model cannot be exported: {_describe_missing(plan)} Train the model of transformers itself rather than "
                "a module around it or a part of it, or give the module a configuration of its own; tensors that were tied "
                f"by hand need a configuration that says so, such as config.tie_word_embeddings=True."
                f"{on_nodes if len(storages) > 1 else ''}"
            )


def without_misleading_files(raw_files: Mapping[str, bytes], plan: WeightPlan) -> dict[str, bytes]:
    """The files that describe the model, but for a configuration of which `from_pretrained` would make fresh weights."""
    if not plan.missing:
        return dict(raw_files)
    _warn_once(
        f"{' and '.join(CONFIG_FILES)} are left out of checkpoints: {_describe_missing(plan)} Training and resuming are not "
        "affected, but from_pretrained does not accept such a checkpoint, and save_model() refuses."
    )
    return {name: data for name, data in raw_files.items() if name not in CONFIG_FILES}


def _describe_missing(plan: WeightPlan) -> str:
    written = list(plan.weight_map)
    return (
        f"the model's configuration is that of {plan.expected_by}, and from_pretrained would make fresh weights for "
        f"{len(plan.missing)} tensors of that class which are not among those written: "
        f"{abbreviate(plan.missing, _NUM_SHOWN)}. Written are {abbreviate(written, _NUM_SHOWN) or 'none'}."
    )


@functools.lru_cache(maxsize=64)
def _warn_once(message: str) -> None:
    logger.warning("%s", message)


# --- words


def _pattern_text(pattern: str, family: str | None) -> str:
    return pattern.upper() if family is None else f"{pattern.upper()} over {family!r}"


def ranks_text(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
