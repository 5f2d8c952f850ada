"""Checks of the planned weight files before anything is written.

The shard index must list exactly the tensors that ranks will write, and `from_pretrained` must find all its weights in
an export. All ranks check the same gathered plans, so they raise the same error. Snapshots call these checks.
"""

import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from forgather.ml.checkpoint.errors import CheckpointSaveError
from forgather.ml.checkpoint.rank_layout import Ranks, ranks_text
from forgather.ml.checkpoint.weights.hf_files import CONFIG_FILES
from forgather.ml.checkpoint.weights.location import abbreviate
from forgather.ml.checkpoint.weights.safetensors_io import SharingMetadataT

logger = logging.getLogger(__name__)

_NUM_SHOWN = 3


@dataclass(frozen=True)
class WeightPlan:
    """Model files that a rank will write; the leader of a directory also sends its index and expected tensors."""

    files: Sequence[tuple[str, Sequence[str]]]
    """Files with their tensor names."""
    weight_map: Mapping[str, str] = field(default_factory=dict)
    """Leader only: the planned file of each tensor."""
    tied: SharingMetadataT = field(default_factory=list)
    """Leader only: groups of tied names, each stored under one name."""
    expected_by: str = ""
    """Leader only: name of the class that `from_pretrained` will build."""
    missing: Sequence[str] = ()
    """Leader only: tensors that this class expects and the files will lack."""


def check_coverage(plans: Sequence[WeightPlan], storages: Sequence[Ranks], held: Sequence[Iterable[str]]) -> None:
    """Raise on every rank unless the planned files match the shard index, tensor by tensor.

    `plans` are the plans of all ranks. `held` are the tensor names of the model in each storage.
    """
    # A storage is a set of ranks that write to the same directory. Each directory has its own index.
    for storage, names in zip(storages, held, strict=True):
        _check_writers(plans, storage)
        _check_places(plans[storage[0]], names)
        _check_index(plans, storage)


def written_files(plans: Sequence[WeightPlan], storage: Ranks) -> dict[str, list[str]]:
    """Return the tensor names of each weight file of a directory, over all its ranks."""
    return {file: list(names) for rank in storage for file, names in plans[rank].files}


def _check_writers(plans: Sequence[WeightPlan], storage: Ranks) -> None:
    # Two ranks with the same file name would overwrite each other's shard.
    writers: dict[str, list[int]] = {}
    for rank in storage:
        for file, _ in plans[rank].files:
            writers.setdefault(file, []).append(rank)
    for file, ranks in writers.items():
        if len(ranks) > 1:
            raise CheckpointSaveError(
                f"The shard index of component 'model' puts tensors of different ranks into {file}: {ranks_text(ranks)} "
                "would all write it. Pass make_shard_index one state dict for each part of the model."
            )


def _check_places(leader: WeightPlan, held: Iterable[str]) -> None:
    stored = set(leader.weight_map)
    # A tied name has no entry, but is covered if another name of its group is stored.
    covered = stored.union(*(group for group in leader.tied if stored & set(group)))
    lost = [name for name in held if name not in covered]
    if lost:
        raise CheckpointSaveError(
            f"The shard index has no file for {len(lost)} tensors of component 'model': {abbreviate(lost, _NUM_SHOWN)}. "
            "Create the index from the current model, or pass none."
        )


def _check_index(plans: Sequence[WeightPlan], storage: Ranks) -> None:
    """Raise if the index and the planned files differ: an index of another model, or different indices on ranks."""
    weight_map = plans[storage[0]].weight_map
    written = {(name, file): rank for rank in storage for file, names in plans[rank].files for name in names}
    files = {file for _, file in written}
    unwritten = [(name, file) for name, file in weight_map.items() if (name, file) not in written]
    if unwritten:
        name, file = unwritten[0]
        what = f"tensor {name} in it" if file in files else f"that file, nor tensor {name} in it"
        raise CheckpointSaveError(
            f"The shard index of component 'model' lists {len(unwritten)} tensors that no rank writes: {file} should have "
            f"{abbreviate([one for one, place in unwritten if place == file], _NUM_SHOWN)}, but none of "
            f"{ranks_text(storage)} writes {what}. The checkpoint could not be loaded. Create the index from the current "
            "model, or pass none."
        )
    for (name, file), rank in written.items():
        if weight_map.get(name) != file:
            raise CheckpointSaveError(
                f"Component 'model': rank {rank} would write tensor {name} into {file}, where the shard index of rank "
                f"{storage[0]} does not have it. Pass all ranks the same shard_index, or none."
            )


# --- what from_pretrained will find


def refuse_incomplete_export(plans: Sequence[WeightPlan], storages: Sequence[Ranks]) -> None:
    """Raise on every rank if `from_pretrained` would initialise tensors of the exported model with random weights."""
    on_nodes = (
        " Directories of single nodes or ranks contain only their own stages: export to storage that all ranks share."
    )
    for plan in plans:
        if plan.missing:
            raise CheckpointSaveError(
                f"The model cannot be exported: {_describe_missing(plan)} Train the transformers model itself and not a "
                "wrapper or a submodule of it, or define a separate configuration for the module. Tensors that were tied "
                f"by hand need a configuration that ties them, such as config.tie_word_embeddings=True."
                f"{on_nodes if len(storages) > 1 else ''}"
            )


def without_misleading_files(raw_files: Mapping[str, bytes], plan: WeightPlan) -> dict[str, bytes]:
    """Return the files that describe the model, without its configuration if `from_pretrained` would misread it."""
    # Without config.json `from_pretrained` fails. With it, missing tensors would silently get random weights.
    if not plan.missing:
        return dict(raw_files)
    _warn_once(
        f"{' and '.join(CONFIG_FILES)} are omitted from checkpoints: {_describe_missing(plan)} Training and resuming are not "
        "affected, but from_pretrained and save_model() will fail."
    )
    return {name: data for name, data in raw_files.items() if name not in CONFIG_FILES}


def _describe_missing(plan: WeightPlan) -> str:
    written = list(plan.weight_map)
    return (
        f"the model has a configuration of {plan.expected_by}, and from_pretrained would create random weights for "
        f"{len(plan.missing)} tensors of that class that are not saved: "
        f"{abbreviate(plan.missing, _NUM_SHOWN)}. Saved tensors: {abbreviate(written, _NUM_SHOWN) or 'none'}."
    )


# The cache makes each message appear once, and not at every save.
@functools.lru_cache(maxsize=64)
def _warn_once(message: str) -> None:
    logger.warning("%s", message)


def refuse_partial_declaration(has_weights: Sequence[bool]) -> None:
    """Raise `CheckpointSaveError` if only some ranks declare the component "model"."""
    # The plan of weight files covers all ranks, so each of them must declare the component.
    without = [rank for rank, has in enumerate(has_weights) if not has]
    if without:
        raise CheckpointSaveError(
            f"Component 'model' is declared by some ranks, but not by {ranks_text(without)}. Every rank must declare it: "
            "PER_RANK if each rank has a part, REPLICATED if each has the full model, GLOBAL if only rank 0 has it."
        )
